"""Credentials in URLs are removed from a recipe when it is read, so that they are never written or
printed.
"""

import netrc
import os
import re
import sys
from typing import Dict, Tuple
from urllib.parse import quote

# A variable: the URL, with its credentials, of the place that data.root names without.
ENVIRONMENT = "DATA_ROOT_URL"

# Of a web server also a user alone may be a token; elsewhere it is no secret.
_USER = re.compile(r'(\bhttps?://)[^\s/?#"]*@|(://)[^\s/?#":@]*:[^\s/?#"]*@', re.IGNORECASE)
# Where the part of a URL ends that is no secret. A web server's may be followed by a query,
# parameters or a fragment of any form; others by ?name=value or ;name=value only, as these
# characters may be in the names of their files.
_PLACE = r"""(?:\bhttps?://[^{no}?#;]*(?=[?#;][^{no}])|://[^{no}]*?(?=[?;][^{no}=/?;]+=))"""
_PLACE_IN_TEXT = re.compile(
    rf"""({_PLACE.format(no=chr(92) + "s'" + '"')})[^\s"']+""", re.IGNORECASE
)
_PLACE_OF_URL = re.compile(_PLACE.format(no=r"\n"), re.IGNORECASE)
_SCHEME = re.compile(r"\b[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_HOST = re.compile(r"\bhttps?://([^\s/:?#;]+)")
_known: Dict[str, str] = {}  # URL without credentials -> with them; in this process's memory alone


def masked(text: str) -> str:
    """Return `text` without the user, password, query, parameters and fragment of each URL in it."""
    return _PLACE_IN_TEXT.sub(r"\1", _without_user(text))


def take(url: str) -> str:
    """Return `url` without its credentials, and with its scheme in small letters.

    `restored` gives the credentials back; this process's command line loses them as well.

    Raises:
        ValueError: the end of the password is ambiguous, or a web address has a fragment, which no
            server would get.
    """
    # Schemes are compared as text below, and by fsspec.
    given = url
    url = _small_scheme(url)
    place, _ = _split(url)
    public = _without_user(place)
    if _is_ambiguous(_without_user(url)) or _is_ambiguous(public):
        fault = "a URL whose password has / (write %2F), ? (%3F) or # (%23) in it"
        raise ValueError(f"{fault}; write those as given here")
    if "#" in url and _HOST.search(url):
        raise ValueError(
            "a web address with # in it, behind which nothing is sent; remove it, or write %23 in a name"
        )
    if public != url:
        _known[public.rstrip("/")] = url
    # The run folder stores the command line.
    if public != given:
        sys.argv[:] = [masked(word.replace(given, public)) for word in sys.argv]
    return public


def _is_ambiguous(url: str) -> bool:
    """Return whether a part of a password may be left in a URL whose user and password were
    removed.
    """
    # An @ that is left belongs to a password with one of / ? # in it, unless what stands before it
    # is an ordinary host and port.
    address = url.rpartition("://")[2]
    port = re.split("[/?#]", address)[0].partition(":")[2]
    return "@" in address and port != "" and not port.isdigit()


def restored(place: str) -> Tuple[str, str]:
    """Return a place with its user and password, and the query that goes behind the names of files
    there.

    They are those of the URL that was taken, or else of the environment, or else the host's in
    ~/.netrc.

    Args:
        place: at or below a URL, without credentials.
    """
    given = _small_scheme(os.environ.get(ENVIRONMENT, ""))
    of_environment = _without_user(_split(given)[0]).rstrip("/")
    for public, url in [*_known.items(), (of_environment, given)]:
        if public != url.rstrip("/") and f"{place}/".startswith(f"{public}/"):
            base, query = _split(url)
            return base.rstrip("/") + place[len(public) :], query
    return _with_netrc(place), ""


def _small_scheme(url: str) -> str:
    """Return a URL with its scheme in small letters."""
    return _SCHEME.sub(lambda match: match.group().lower(), url)


def _without_user(text: str) -> str:
    """Return a text without the user and password of each URL in it."""
    return _USER.sub(lambda match: match.group(1) or match.group(2), text)


def _split(url: str) -> Tuple[str, str]:
    """Return the place that a URL names, and the query or parameters behind it, with their mark."""
    match = _PLACE_OF_URL.search(url)
    return (url[: match.end()], url[match.end() :]) if match else (url, "")


def environment() -> Dict[str, str]:
    """Return environment variables that give another process the credentials that were taken last."""
    if not _known:
        return {}
    # A run has one place of images, so the last is the one.
    last = list(_known.values())[-1]
    return {ENVIRONMENT: last}


def _with_netrc(place: str) -> str:
    """Return a web address with the user and password that ~/.netrc has for its host, if any."""
    # Only web servers: other places have credentials of their own kind, in files of their own.
    host = _HOST.search(place)
    if host is None:
        return place
    try:
        entry = netrc.netrc(os.environ.get("NETRC")).hosts.get(host.group(1))
    except (OSError, ValueError, netrc.NetrcParseError):  # a file of other programs
        entry = None
    if entry is None:
        return place
    user, _, password = entry
    login = f"{quote(user, safe='')}:{quote(password or '', safe='')}@"
    return place[: host.start(1)] + login + place[host.start(1) :]

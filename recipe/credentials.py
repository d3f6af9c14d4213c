"""Credentials in URLs are removed from a recipe when it is read, so that they are never written or printed."""

import netrc
import os
import re
import sys
from typing import Dict, Tuple
from urllib.parse import quote

ENVIRONMENT = "DATA_ROOT_URL"  # a variable: the URL, with its credentials, of the place that data.root names without

_USER = re.compile(r'(\bhttps?://)[^\s/?#"]*@|(://)[^\s/?#":@]*:[^\s/?#"]*@')  # elsewhere a user alone is no secret
_QUERY = re.compile(r"""(://[^\s"'?]*)(\?[^\s"'=]+=[^\s"']*)""")
_HOST = re.compile(r"\bhttps?://([^\s/:?#]+)")
_known: Dict[str, str] = {}  # URL without credentials -> with them; in this process's memory alone


def masked(text: str) -> str:
    """`text` without the user, password and query of each URL in it."""
    return _QUERY.sub(r"\1", _USER.sub(lambda found: found.group(1) or found.group(2), text))


def take(url: str) -> str:
    """`url` without its credentials, which `restored` gives back; this process's command line loses them as well.
    Raises ValueError where the end of the password is ambiguous."""
    public = masked(url)
    place = public.rpartition("://")[2]
    port = re.split("[/?#]", place)[0].partition(":")[2]
    if "@" in place and port and not port.isdigit():
        raise ValueError("a URL whose password has / (write %2F), ? (%3F) or # (%23) in it; write those as given here")
    if public != url:
        _known[public.rstrip("/")] = url
        sys.argv[:] = map(masked, sys.argv)
    return public


def restored(place: str) -> Tuple[str, str]:
    """A place at or below a URL, with its user and password, and the query that goes behind the names of files there:
    those of the URL that was taken, or else of the environment, or else the host's in ~/.netrc."""
    given = os.environ.get(ENVIRONMENT, "")
    for public, url in [*_known.items(), (masked(given).rstrip("/"), given)]:
        if public != url.rstrip("/") and f"{place}/".startswith(f"{public}/"):
            found = _QUERY.search(url)
            base, query = (url[: found.end(1)], found.group(2)) if found else (url, "")
            return base.rstrip("/") + place[len(public) :], query
    return _with_netrc(place), ""


def environment() -> Dict[str, str]:
    """Environment variables that give another process the credentials that were taken last."""
    return {ENVIRONMENT: list(_known.values())[-1]} if _known else {}


def _with_netrc(place: str) -> str:
    host = _HOST.search(place)
    try:
        entry = netrc.netrc(os.environ.get("NETRC")).hosts.get(host.group(1)) if host else None
    except (OSError, ValueError, netrc.NetrcParseError):  # a file of other programs
        entry = None
    if entry is None:
        return place
    user, _, password = entry
    login = f"{quote(user, safe='')}:{quote(password or '', safe='')}@"
    return place[: host.start(1)] + login + place[host.start(1) :]

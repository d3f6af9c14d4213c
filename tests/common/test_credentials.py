"""Credentials in URLs are taken out of a recipe before anything can be written or printed of it."""

import re
import sys

import pytest

from common import credentials
from common.errors import ConfigError, DataError, first_line
from recipe import loading
from recipe.config import Data
from tests.conftest import QUICKSTART

SECRET = "hunter2"
URLS = [
    (f"http://user:{SECRET}@host/images", "http://host/images"),
    (f"https://user:a@b:{SECRET}@host:8080/images", "https://host:8080/images"),
    (f"https://{SECRET}@host/images", "https://host/images"),
    (f"s3://AKIA:{SECRET}@bucket/images", "s3://bucket/images"),
    (f"simplecache::http://user:{SECRET}@host/images", "simplecache::http://host/images"),
    (f"https://host/images?sv=2020&sig={SECRET}", "https://host/images"),
    (f"https://user:x@host/images?sig={SECRET}", "https://host/images"),
    (f"https://host/images?{SECRET}", "https://host/images"),
    (f"https://host/my images?a'{SECRET}", "https://host/my images"),
    (f"https://host/images;sig={SECRET}/a?b", "https://host/images"),
    (f"https://host/images;{SECRET}", "https://host/images"),
    (f"s3://bucket/images;sig={SECRET}", "s3://bucket/images"),
    (f"HTTPS://user:{SECRET}@host/images", "https://host/images"),
    (f"Http://{SECRET}@host/images", "http://host/images"),
    (f"simplecache::HTTPS://host/images?{SECRET}", "simplecache::https://host/images"),
]


@pytest.fixture(autouse=True)
def _no_others(monkeypatch, tmp_path):
    """Neither those of other tests nor those of whoever runs them."""
    monkeypatch.setattr(credentials, "_known", {})
    monkeypatch.delenv(credentials.ENVIRONMENT, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.mark.parametrize(("url", "public"), URLS)
def test_a_recipe_and_errors_have_the_url_without_its_credentials(url, public, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", f"data.root={url}"])
    recipe = loading.load(QUICKSTART, ["data.source=shards", f"data.root={url}"])
    assert recipe.data.root == public
    url = re.sub("[ ']", "", url)  # where a URL ends within other text
    public = public.replace(" ", "")
    errors = [str(kind(f"{url}: gone")) for kind in (ConfigError, DataError)] + [
        first_line(ValueError(f"no {url}"))
    ]
    for text in (loading.dump(recipe), recipe.model_dump_json(), repr(recipe), *sys.argv, *errors):
        assert SECRET not in text
    assert all(public in error.lower() for error in errors)
    assert loading.loads(loading.dump(recipe), "there") == recipe


@pytest.mark.parametrize(("url", "public"), URLS)
@pytest.mark.parametrize("given", ["recipe", "environment"])
def test_this_process_has_them_for_the_place_and_all_below_it(url, public, given, monkeypatch):
    if given == "recipe":
        Data(root=url if re.search("[?;]", url) else url + "/")
    else:
        monkeypatch.setenv(credentials.ENVIRONMENT, url)
    url = re.sub("https?:", lambda found: found.group().lower(), url, flags=re.IGNORECASE)
    base, query = re.fullmatch("([^?;]*)(.*)", url).groups()
    assert credentials.restored(public) == (base, query)
    assert credentials.restored(f"{public}/train") == (f"{base}/train", query)
    assert credentials.restored(f"{public}-of-others") == (f"{public}-of-others", "")


@pytest.mark.parametrize(
    "url",
    ["/images", "s3://bucket/images", "http://host:80/a@b/c", "http://[::1]:80/images", "sftp://user@host/images",
     "abfs://container@account.dfs.core.windows.net/images", "memory://x?y/images", "zip://a.zip::file:///x@y",
     "file:///images/what?", "s3://bucket/a;b/c", "s3://bucket/a#b", "https://host/what?"],
)  # fmt: skip
def test_a_url_without_secrets_is_left_alone(url):
    assert credentials.take(url) == url
    assert credentials.restored(url) == (url, "")
    assert credentials.environment() == {}


def test_of_several_the_command_line_comes_before_the_environment_and_that_before_netrc(
    monkeypatch, tmp_path
):
    (tmp_path / "netrc").write_text(
        "machine host login me@work password a/b?c\ndefault login no password no\n"
    )
    assert credentials.restored("http://host:8080/x/train") == (
        "http://me%40work:a%2Fb%3Fc@host:8080/x/train",
        "",
    )
    assert credentials.restored("http://another/x") == ("http://another/x", "")
    assert credentials.restored("s3://host/x") == ("s3://host/x", "")
    (tmp_path / "netrc").write_text("not a netrc")
    assert credentials.restored("http://host/x") == ("http://host/x", "")
    monkeypatch.setenv(credentials.ENVIRONMENT, "http://e:1@host:8080/x/")
    assert credentials.restored("http://host:8080/x/train") == ("http://e:1@host:8080/x/train", "")
    credentials.take("http://c:2@host:8080/x")
    assert credentials.restored("http://host:8080/x/train") == ("http://c:2@host:8080/x/train", "")
    assert credentials.environment() == {credentials.ENVIRONMENT: "http://c:2@host:8080/x"}


@pytest.mark.parametrize(
    "url", [f"s3://AKIA:{SECRET}/x@bucket/y", f"http://user:{SECRET}#1@host/y"]
)
def test_a_password_with_an_ambiguous_end_is_refused_and_not_shown(url):
    with pytest.raises(ConfigError, match=r"data\.root: .*write %2F") as caught:
        loading.load(QUICKSTART, [f"data.root={url}"])
    assert SECRET not in str(caught.value)


def test_a_fragment_of_a_web_address_is_refused_and_not_shown():
    """No server ever gets it, so it is a slip, or a token that is meant for a browser."""
    for scheme in ("http", "HTTPS", "simplecache::https"):
        with pytest.raises(ConfigError, match=r"data\.root: .* remove it, or write %23") as caught:
            loading.load(
                QUICKSTART, ["data.source=shards", f"data.root={scheme}://host/images#{SECRET}"]
            )
        assert SECRET not in str(caught.value)
        assert str(ConfigError(f"{scheme}://host/images#{SECRET}: gone")).endswith(
            "://host/images gone"
        )

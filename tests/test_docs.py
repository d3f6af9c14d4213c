"""Keys that pages name are keys of recipes."""

import re

import pytest

from recipe import loading
from tests.conftest import QUICKSTART, ROOT

_TABLE = (ROOT / "docs" / "coming_from.md").read_text().partition("## Flags and keys")[2].partition("## What is")[0]
_ROWS = [line.split("|")[5] for line in _TABLE.splitlines() if line.startswith("|")][2:]
GIVEN = [(text, re.findall(r"`([^`]*=[^`]*)`", text)) for text in _ROWS]


@pytest.mark.parametrize(("text", "given"), GIVEN, ids=[text.strip() for text, _ in GIVEN])
def test_keys_beside_the_flags_of_others_make_a_recipe(text, given):
    overrides = [each for part in given for each in part.split()]
    loading.load(QUICKSTART, [each for each in overrides if "DIR" not in each])  # an unknown key is an error

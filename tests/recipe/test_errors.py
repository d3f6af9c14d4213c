"""What is printed of names and messages that others wrote."""

import os

import pytest

from recipe.errors import UserError, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("café 日本\u3000🦜 c:\\new", "café 日本\u3000🦜 c:\\new"),
        ("\x1b]0;owned\x07\x1b[2J", r"\x1b]0;owned\x07\x1b[2J"),
        ("one\r\ntwo\u2028three\x85", r"one\r\ntwo\u2028three\x85"),
        ("\x9b31m\x7f\0", r"\x9b31m\x7f\x00"),
        ("gpj.\u202eexe", r"gpj.\u202eexe"),
        (os.fsdecode(b"caf\xe9"), r"caf\xe9"),
        ("\ud800", r"\ud800"),
    ],
)
def test_what_steers_a_terminal_is_shown_as_its_escape(text, shown):
    assert printable(text) == shown
    assert printable(text).encode("utf-8")


def test_an_error_is_one_printable_line():
    assert str(UserError("a\nb\x1b[31m: wrong")) == r"a b\x1b[31m: wrong"

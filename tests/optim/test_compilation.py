"""Without a compiler that does its work the update runs uncompiled, and a line says why."""

import shutil
from pathlib import Path

import pytest
import torch

from optim import compilation, layout


def note_of(monkeypatch, compiler):
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(compilation, "library", compilation.library.__wrapped__)
    rows = torch.zeros(4)
    _, note = compilation.compiled(layout.Buffers(rows, rows, rows, {}), stochastic=True)
    return note


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"printf 'fault: \\377\\033[1m\\n'; exit 3", "fault: \ufffd\\x1b[1m"),
        (b"exit 0", "update.so"),
        (b'for last; do :; done; cp %s "$last"', "made a library without lars_sums"),
    ],
)
def test_a_compiler_that_fails_or_makes_no_library_of_ours_is_named_in_a_line(monkeypatch, tmp_path, text, words):
    other = bytes(Path(torch.__file__).parent / "lib" / "libtorch_global_deps.so")
    compiler = tmp_path / "compiler"
    compiler.write_bytes(b"#!/bin/sh\n" + text.replace(b"%s", other))
    compiler.chmod(0o755)
    note = note_of(monkeypatch, compiler)
    assert note.startswith("engine.compile: the update runs uncompiled: ") and words in note, note


def test_a_compiler_that_cannot_be_named_is_quoted(monkeypatch):
    assert "uncompiled: CXX=g++ ': No closing quotation" in note_of(monkeypatch, "g++ '")


@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")
def test_the_line_of_an_update_that_is_compiled_says_how_long_it_took(monkeypatch):
    assert note_of(monkeypatch, "c++").startswith("the update is compiled: ready after ")

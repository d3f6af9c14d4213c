"""Compilers that are not there, fail or hang: the update then runs uncompiled, and a line says why."""

from pathlib import Path

import pytest
import torch

from optim import compilation, layout
from tests.waiting import wait_until


def script(folder, text):
    path = folder / "compiler"
    path.write_bytes(b"#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def test_a_compiler_that_misbehaves_is_ended_and_named(monkeypatch, tmp_path):
    """It hangs together with what it started, prints for ever or no UTF-8, makes nothing or another library, asks for
    input, or cannot be named."""
    monkeypatch.setattr(compilation, "_library", compilation._library.__wrapped__)
    monkeypatch.setattr(compilation, "_SECONDS", 1.0)
    other = Path(torch.__file__).parent / "lib" / "libtorch_global_deps.so"
    rows = torch.zeros(4)
    cases = [
        (script, b"sleep 600 & echo $! > %s; wait" % bytes(tmp_path / "pid"), "was ended after 1 s without a result"),
        (script, b"cat /dev/zero", "was ended after it had printed 1 MiB"),
        (script, b"printf 'fault: \\377\\033[1m\\n'; exit 3", "fault: \ufffd\\x1b[1m"),
        (script, b"exit 3", "ended with 3 and printed nothing"),
        (script, b"exit 0", "update.so"),
        (script, b"cat; exit 4", "ended with 4 and printed nothing"),
        (script, b'for last; do :; done; cp %s "$last"' % bytes(other), "made a library without lars_sums"),
        (None, "g++ '", "CXX=g++ ': No closing quotation"),
    ]
    for make, text, words in cases:
        monkeypatch.setenv("CXX", make(tmp_path, text) if make else text)
        _, note = compilation.compiled(layout.Buffers(rows, rows, rows, {}), stochastic=True)
        assert note.startswith("engine.compile: the update runs uncompiled: ") and words in note, note
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not Path(f"/proc/{child}").exists() or "zombie" in Path(f"/proc/{child}/status").read_text())


def test_an_empty_name_of_a_compiler_is_none(monkeypatch):
    monkeypatch.setenv("CXX", "")
    commands = []
    monkeypatch.setattr(compilation, "_run", lambda command, messages: commands.append(command))
    with pytest.raises(OSError, match=r"update\.so"):
        compilation._library.__wrapped__()
    assert commands[0][0] == "c++"

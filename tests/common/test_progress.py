"""Progress: plain lines where there is no terminal; on one a live line, below what is printed, that
leaves nothing."""

import os
import pty
import re
import subprocess
import sys
import time

import pytest

from common import progress
from tests.conftest import ROOT
from tests.waiting import wait_until

SHOWN_CURSOR = "\x1b[?25h"
WORK = """
import sys, time
from common import progress

with progress.lines(lambda: "outer work", lambda: 0.25{more}):
    time.sleep(0.5)
    print("a line meanwhile")
    for _ in progress.counted(range(2), 2, "inner things"):
        time.sleep(0.3)
print("the end")
"""


def on_terminal(program, **variables):
    """Run a program of Python on a terminal of 100 columns; return its output."""
    main, other = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30", **variables}
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=other, stdout=other, stderr=other
    )
    os.close(other)
    output = b""
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:  # how Linux says that no process has the other end
            break
        if not piece:
            break
        output += piece
    os.close(main)
    assert process.wait() == 0, output.decode()
    return output.decode()


def screen(output):
    """Return the lines that a terminal shows in the end, of output that moves to the left or up by
    one line only."""
    lines = [""]
    row = 0
    column = 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", output):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token == "\x1b[2K":
            lines[row] = ""
        elif token == "\x1b[1A":
            row -= 1
        elif not token.startswith("\x1b"):
            lines[row] = (
                lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
            )
            column += len(token)
    return [line.rstrip() for line in lines if line.strip()]


def test_a_live_line_shows_text_and_share_and_leaves_what_was_printed():
    output = on_terminal(WORK.format(more=""))
    assert "outer work" in output and " 25%" in output and "━" in output
    assert "inner things" not in output, "a second live line would tear the first"
    assert screen(output) == ["a line meanwhile", "the end"]
    assert output.rfind(SHOWN_CURSOR) > output.rfind("\x1b[?25l"), "the cursor stays hidden"


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"RANK": "1"}])
def test_other_ranks_and_simple_terminals_have_no_live_line(variables):
    output = on_terminal(WORK.format(more=""), **variables)
    assert output.split() == ["a", "line", "meanwhile", "the", "end"]


def test_a_forked_process_prints_beside_a_live_line():
    """Its copy of the line has no thread, and a lock that may be held for ever."""
    program = """
import os
from common import progress

with progress.lines(lambda: "work"):
    for _ in range(20):
        child = os.fork()
        if not child:
            print("from the child", flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
print("the end")
"""
    output = on_terminal(program)
    assert output.count("from the child") == 20 and screen(output)[-1] == "the end"


def test_a_plain_line_comes_every_so_often(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", 0.01)
    line = re.compile(r"of 3 things are done \(\d:\d\d:\d\d\)")
    for _ in progress.counted(range(3), 3, "things are done"):
        wait_until(lambda: line.search(capsys.readouterr().out))
    with progress.lines(lambda: "said elsewhere", elsewhere=False):
        time.sleep(0.1)
    assert "said" not in capsys.readouterr().out


def test_other_ranks_print_no_plain_lines(monkeypatch, capsys):
    """A line of each rank of a host would be the same line many times, and none could be told
    apart."""
    monkeypatch.setattr(progress, "EVERY", 0.01)
    monkeypatch.setenv("RANK", "1")
    with progress.lines(lambda: "work"):
        time.sleep(0.1)
    assert capsys.readouterr().out == ""

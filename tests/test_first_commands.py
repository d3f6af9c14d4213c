"""docs/first_commands.md: each command, in the order of the page, in a folder that has the repository's files."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "first_commands.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [
    (command, shown.splitlines())
    for block in BLOCKS
    for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
]
NUMBER = r"\d[\d,.:]*"


def as_pattern(line):
    """A line whose numbers may be others."""
    return re.compile(r"\S+".join(map(re.escape, re.split(NUMBER, line))))


def test_there_are_ten_and_each_is_one_line_of_a_screen():
    assert len(COMMANDS) == 10
    assert all(shown and len(command) < 100 for command, shown in COMMANDS)


@pytest.mark.slow  # trains twice for half a minute
@pytest.mark.multiprocess
def test_they_do_what_the_page_shows(tmp_path):
    for path in ROOT.iterdir():
        if path.name not in (".git", "runs", "doctor", "report.html"):
            (tmp_path / path.name).symlink_to(path)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for command, shown in COMMANDS:
        done = subprocess.run(
            shlex.split(command), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, (command, done.stderr)
        lines = (done.stdout + done.stderr).splitlines()
        for line in shown:
            assert any(as_pattern(line).fullmatch(each) for each in lines), (command, line, lines)

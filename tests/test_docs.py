"""Pages keep what they show: keys of recipes, the loop of docs/library.md, the first commands."""

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from recipe import loading
from tests import world
from tests.conftest import QUICKSTART, ROOT

KEYS, LIBRARY, COMMANDS = (
    (ROOT / "docs" / f"{name}.md").read_text()
    for name in ("coming_from", "library", "first_commands")
)
ROWS = [
    line.split("|")[5]
    for line in KEYS.partition("## Flags and keys")[2].partition("## What is")[0].splitlines()
    if line.startswith("|")
]
LOOP = re.search(r"```python\n(.*?)```", LIBRARY, re.DOTALL).group(1)
# (command, lines that are shown of its output)
SHOWN = [
    (command, shown.splitlines())
    for block in re.findall(r"```console\n(.*?)```", COMMANDS, re.DOTALL)
    for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
]


@pytest.mark.parametrize("text", ROWS[2:], ids=str.strip)
def test_keys_beside_the_flags_of_others_make_a_recipe(text):
    overrides = [each for part in re.findall(r"`([^`]*=[^`]*)`", text) for each in part.split()]
    # an unknown key is an error
    loading.load(QUICKSTART, [each for each in overrides if "DIR" not in each])


def trains(rank, size, sparse):
    """The losses of the page's loop."""
    names = {}
    exec(compile(LOOP, "docs/library.md", "exec"), names)
    return names["train"](6, sparse)


@pytest.mark.multiprocess
@pytest.mark.parametrize("sparse", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_loop_of_the_page_learns_on_two_ranks(sparse):
    for losses in world.run(2, trains, sparse):
        assert len(losses) == 6 and losses[-1] < losses[0]


def test_there_are_ten_first_commands_and_each_is_one_line_of_a_screen():
    assert len(SHOWN) == 10
    assert all(shown and len(command) < 100 for command, shown in SHOWN)


# What is measured: scores and losses, times, sizes of files, noise scales.
MEASURED = re.compile(
    r"[\d.]+%|(?<=loss )[\d.]+|\d+:\d\d:\d\d|[\d.]+(?= MB)|\d+ ± \d+|(?<=critical   )\d+"
)


def as_pattern(line):
    """A line in which numbers that are measured may be others."""
    words = map(re.escape, MEASURED.split(line))
    numbers = [re.sub(r"[\d.:]+", r"[\\d.:]+", measured) for measured in MEASURED.findall(line)]
    return re.compile(
        "".join(
            word + number for word, number in itertools.zip_longest(words, numbers, fillvalue="")
        )
    )


def test_only_what_is_measured_may_differ_from_the_page():
    pattern = as_pattern(
        "evaluation after epoch 6.00: top1 91.67%  loss 0.4419, 5.0 MB, noise scale 131 ± 44, 0:00:45"
    )
    assert pattern.fullmatch(
        "evaluation after epoch 6.00: top1 9.1%  loss 1.2, 15.1 MB, noise scale 1 ± 4, 1:00:00"
    )
    assert not pattern.fullmatch(
        "evaluation after epoch 5.00: top1 9.1%  loss 1.2, 15.1 MB, noise scale 1 ± 4, 1:00:00"
    )


@pytest.mark.slow  # trains twice for half a minute
@pytest.mark.multiprocess
def test_the_first_commands_do_what_the_page_shows(tmp_path):
    """In the order of the page, in a folder that has the repository's files."""
    for path in ROOT.iterdir():
        if path.name not in (".git", "runs", "doctor", "report.html"):
            (tmp_path / path.name).symlink_to(path)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    options = {
        "cwd": tmp_path,
        "env": environment,
        "capture_output": True,
        "text": True,
        "timeout": 600,
    }
    for command, shown in SHOWN:
        done = subprocess.run(shlex.split(command), **options)
        assert done.returncode == 0, (command, done.stderr)
        lines = (done.stdout + done.stderr).splitlines()
        # Beside other work the doctor writes no machine for plans: its figures are in doubt.
        if any(line.endswith("as the figures are in doubt") for line in lines):
            shown = [line.replace("doctor/machine.yaml, ", "") for line in shown]
        for line in shown:
            assert any(as_pattern(line).fullmatch(each) for each in lines), (command, line, lines)

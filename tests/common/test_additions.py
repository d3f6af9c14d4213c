"""--import: a file is imported once under its own name; what cannot be is refused in one line."""

import subprocess
import sys

import pytest

from common import additions
from common.errors import ConfigError
from tests.conftest import ROOT


@pytest.fixture
def fresh(monkeypatch):
    """No file was imported; sys.path is restored afterwards."""
    monkeypatch.setattr(additions, "_imported", [])
    monkeypatch.setattr(sys, "path", list(sys.path))


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_a_file_and_its_neighbours_are_imported_once(fresh, tmp_path, monkeypatch):
    counted = write(
        tmp_path / "counted_addition.py",
        "import neighbour_of_it\nneighbour_of_it.TIMES.append(1)\n",
    )
    write(tmp_path / "neighbour_of_it.py", "TIMES = []\n")
    monkeypatch.chdir(tmp_path)
    for path in (counted, "counted_addition.py"):
        additions.import_file(path)
    assert sys.modules["neighbour_of_it"].TIMES == [1]
    assert additions.words() == ["--import", str((tmp_path / "counted_addition.py").resolve())]
    assert sys.path[-1] == str(tmp_path), "before other folders it could hide their modules"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere.py", "nowhere.py: no such file; name a Python file"),
        ("my-optimizer.py", "my-optimizer.py: no Python file; name one like my_optimizer.py"),
        ("recipe.yaml", "recipe.yaml: no Python file"),
        (
            "recipe.py",
            r"this Python has a module recipe \(.*/recipe/__init__.py\); give the file another name",
        ),
        ("colorsys.py", r"this Python has a module colorsys \("),
    ],
)
def test_what_cannot_be_imported_is_refused(fresh, tmp_path, name, said):
    if name != "nowhere.py":
        write(tmp_path / name, "raise AssertionError('imported')\n")
    with pytest.raises(ConfigError, match=said):
        additions.import_file(str(tmp_path / name))
    assert additions.words() == []


def test_a_fault_within_the_file_is_shown_with_its_line(tmp_path):
    """It is the user's own code: a traceback helps more than a line."""
    path = write(tmp_path / "broken_addition.py", "\nnothing_of_this_name\n")
    command = [sys.executable, "train.py", "--import", path, "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f'{path}", line 2' in done.stderr and "NameError" in done.stderr

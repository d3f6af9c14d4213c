"""How every command starts and ends: what Ctrl-C, its output or the input ends is one line and a documented code."""

import errno
import json
import os
import re
import subprocess
import sys

import pytest

from recipe.errors import ConfigError
from recipe.files import writing
from tests.conftest import ROOT
from training.command import one_line

DONE, FAILED, WRONG_INPUT = 0, 1, 2
_BEGINNING = re.compile(r"^    run\(__file__\)$", re.MULTILINE)
_FILES = [ROOT / "train.py", ROOT / "evaluate.py"]
_FILES += [path for room in ("tools", "benchmarks") for path in (ROOT / room).rglob("*.py")]
COMMANDS = sorted(str(path.relative_to(ROOT)) for path in _FILES if _BEGINNING.search(path.read_text()))
AGAIN = "rerun the same command"

# A command file as `python FILE` runs it. Ctrl-C comes when the module `at` is about to be imported; without a name,
# with the first import that follows those of the beginning.
INTERRUPTED = """
import os, runpy, signal, sys
file, at = sys.argv[1:3]
sys.path[0] = os.path.dirname(file)
class Finder:
    def find_spec(name, path=None, target=None):
        begun = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        if begun and at in ("", name):
            sys.meta_path.remove(Finder)
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder)
sys.argv[:] = [file, *sys.argv[3:]]
runpy.run_path(file, run_name="__main__")
"""

# A command file whose main() is another: it prints until its output must have been written, and says that it went on.
PRINTING = """
import os, runpy, sys, types
file, name = sys.argv[1:]
sys.path[0] = os.path.dirname(file)
command = sys.modules[name] = types.ModuleType(name)
def main():
    for _ in range(3):
        print("x" * 100_000, flush=True)
    print("went on", file=sys.stderr)
    return 0
command.main = main
runpy.run_path(file, run_name="__main__")
"""


def start(program, *arguments, cwd=None, **streams):
    """A process of Python that Ctrl-C may interrupt, though shells may let background jobs ignore it."""
    default = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    command = [sys.executable, "-c", default + program, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, text=True, timeout=300, **streams)


def test_whatever_is_started_by_its_name_begins_as_a_command_does():
    """Those that are started otherwise: the schema's writer, and a measurement that the doctor starts."""
    started = {str(path.relative_to(ROOT)) for path in _FILES if "__main__" in path.read_text()}
    assert started <= set(COMMANDS)
    assert {"train.py", "evaluate.py", "tools/report.py", "benchmarks/step.py"} <= set(COMMANDS)
    assert len(COMMANDS) > 25


@pytest.mark.parametrize(
    ("file", "at", "arguments"),
    [
        ("train.py", "", ()),
        ("train.py", "torch.nn", ()),
        *(pytest.param(file, "", (), marks=pytest.mark.slow) for file in COMMANDS),
        pytest.param("train.py", "pydantic", (), marks=pytest.mark.slow),
        pytest.param("evaluate.py", "numpy.linalg", ("--checkpoint", "nowhere"), marks=pytest.mark.slow),
        pytest.param("tools/shards.py", "torch.utils", ("verify", "nowhere"), marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_during_imports_is_one_line(file, at, arguments, tmp_path):
    """Whatever a library makes of it. Started by its path from another folder: the repository's imports are found."""
    ended = start(INTERRUPTED, ROOT / file, at, *arguments, cwd=tmp_path, capture_output=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (FAILED, "", f"interrupted; {AGAIN}\n")


def test_a_reader_that_leaves_does_not_end_a_command():
    """`| head -1`. That all commands begin alike is the test above."""
    reading, written = os.pipe()
    os.close(reading)
    try:
        ended = start(PRINTING, ROOT / "train.py", "train", stdout=written, stderr=subprocess.PIPE)
    finally:
        os.close(written)
    assert (ended.returncode, ended.stderr) == (DONE, "went on\n")


def test_a_closed_output_does_not_end_a_command():
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", PRINTING, ROOT / "train.py", "train"]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (DONE, "went on\n")


def test_output_for_which_there_is_no_room_is_one_line_that_names_it():
    with open("/dev/full", "w") as full:
        ended = start(PRINTING, ROOT / "train.py", "train", stdout=full, stderr=subprocess.PIPE)
    assert ended.returncode == FAILED
    assert ended.stderr == f"standard output: No space left on device; make room, then {AGAIN}\n"


def test_a_closed_output_is_not_taken_by_the_next_file(tmp_path):
    """That file would receive what is printed."""
    program = (
        "import sys\n"
        "from training import command\n"
        "command._open_streams()\n"
        "file = open(sys.argv[1], 'w')\n"
        "print('a line', flush=True)\n"
        "print(file.fileno() > 2, file=sys.stderr)"
    )
    place = tmp_path / "file"
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", program, place]
    ended = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert (ended.stderr, place.read_text()) == ("True\n", "")


def test_argparse_is_refused_an_output_without_room_and_prints_one_line():
    """What argparse itself prints and ends with."""
    curves = [sys.executable, ROOT / "tools" / "curves.py"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run([*curves, "--help"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == FAILED and ended.stderr.startswith("standard output: No space left on device")
    ended = subprocess.run([*curves, "--shape"], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr.count("\n")) == (WRONG_INPUT, 1)


def test_recipes_of_the_repository_are_found_from_elsewhere_and_those_that_are_there_come_first(tmp_path):
    def plan():
        command = [sys.executable, ROOT / "tools" / "plan.py", "--config", "configs/quickstart.yaml", "--json"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return json.loads(ended.stdout.splitlines()[-1])["batch"]["global"]

    from_repository = plan()
    own = tmp_path / "configs" / "quickstart.yaml"
    own.parent.mkdir()
    own.write_text(f"extends: {ROOT / 'configs' / 'quickstart.yaml'}\nbatch: {{global: 24, micro: 12}}\n")
    assert plan() == 24 != from_repository


def test_an_error_names_the_place_that_it_is_about(tmp_path, capsys):
    place = tmp_path / "page.html"

    @one_line()
    def main(error):
        with writing(place):
            raise error

    def line(error):
        assert main(error) == FAILED
        return capsys.readouterr().err

    full = errno.ENOSPC, os.strerror(errno.ENOSPC)
    assert line(OSError(*full)) == f"{place}: No space left on device; make room, then {AGAIN}\n"
    assert line(OSError(*full, "/dev/shm/x")) == f"/dev/shm/x: No space left on device; make room, then {AGAIN}\n"
    read_only = OSError(errno.EROFS, os.strerror(errno.EROFS))
    assert line(read_only) == f"{place}: Read-only file system; fix this, then {AGAIN}\n"
    assert line(KeyboardInterrupt()) == f"interrupted; {AGAIN}\n"


def test_wrong_input_is_2_and_a_fault_of_the_program_keeps_its_traceback(capsys):
    @one_line()
    def main(error):
        raise error

    assert main(ConfigError("a.yaml: wrong; mend it")) == WRONG_INPUT
    assert capsys.readouterr().err == "a.yaml: wrong; mend it\n"
    with pytest.raises(ZeroDivisionError):
        main(ZeroDivisionError())

"""How every command starts and ends: what Ctrl-C, its output or the input ends is one line and a
documented code."""

import argparse
import errno
import os
import re
import signal
import subprocess
import sys

import pytest

import train
from common import command, cores
from common.command import one_line
from common.errors import ConfigError, MachineError
from common.files import writing
from tests.conftest import ROOMS, ROOT

DONE = 0
FAILED = 1
WRONG_INPUT = 2
STOPPED = 75
_BEGINNING = re.compile(r"^    run\(__file__(, computes=False)?\)$", re.MULTILINE)
_FILES = [ROOT / "train.py", ROOT / "evaluate.py"]
_FILES += [path for room in ("tools", "benchmarks") for path in (ROOT / room).rglob("*.py")]
_SOURCES = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
COMMANDS = sorted(
    str(path.relative_to(ROOT)) for path in _FILES if _BEGINNING.search(path.read_text())
)
AGAIN = "rerun the same command"

# A command file as `python FILE` runs it. Ctrl-C comes when the module `at` is about to be
# imported; without a name, with the first import that follows those of the beginning.
INTERRUPTED = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells may let background jobs ignore it
file, at = sys.argv[1:3]
sys.path[0] = os.path.dirname(file)
class Finder:
    def find_spec(name, path=None, target=None):
        begun = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        if begun and at in ("", name):
            sys.meta_path.remove(Finder)
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder)
sys.argv[:] = [file]
runpy.run_path(file, run_name="__main__")
"""


def test_whatever_is_started_by_its_name_begins_as_a_command_does():
    """Only the schema's writer and a measurement of the doctor start otherwise."""
    started = {str(path.relative_to(ROOT)) for path in _FILES if "__main__" in path.read_text()}
    assert started <= set(COMMANDS)
    assert {"train.py", "evaluate.py", "tools/report.py", "benchmarks/step.py"} <= set(COMMANDS)
    assert len(COMMANDS) > 25


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, (":4096:8", "expandable_segments:True")),
        ({"CUBLAS_WORKSPACE_CONFIG": ":16:8", "PYTORCH_ALLOC_CONF": ""}, (":16:8", "")),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, (":4096:8", None)),
    ],
)
def test_what_torch_reads_once_is_set_before_a_command_loads_it_unless_the_user_has(
    given, found, monkeypatch
):
    names = ("CUBLAS_WORKSPACE_CONFIG", "PYTORCH_ALLOC_CONF")
    for name in (*names, "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, given.get(name, ""))
        if name not in given:
            monkeypatch.delenv(name)
    monkeypatch.setattr(command, "_open_streams", lambda: None)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(command, "finish", lambda main: seen.extend(map(os.environ.get, names)))
    seen = []
    command.run(ROOT / "train.py")
    assert tuple(seen) == found


@pytest.mark.parametrize(
    ("limit", "given", "keywords", "found"),
    [
        (None, None, {}, None),  # torch counts for itself
        (3, None, {}, "3"),
        (3, "7", {}, "7"),
        (3, None, {"computes": False}, None),  # a launcher divides them among its ranks
    ],
)
def test_a_command_computes_with_the_threads_that_a_quota_allows(
    limit, given, keywords, found, monkeypatch
):
    for name in command._OF_CORES:
        monkeypatch.setenv(name, given or "")
        if given is None:
            monkeypatch.delenv(name)
    monkeypatch.setattr(cores, "limited", lambda: limit)
    monkeypatch.setattr(command, "_open_streams", lambda: None)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(
        command, "finish", lambda main: seen.extend(map(os.environ.get, command._OF_CORES))
    )
    seen = []
    command.run(ROOT / "train.py", **keywords)
    assert seen == [found, found]


def test_processes_that_get_an_environment_of_their_own_have_these_variables_too():
    """torchrun, SLURM and spawned processes hand theirs on; where a file composes one, it begins
    with the parent's."""
    composing = [
        file for file in _SOURCES if re.search(r"\benv(ironment)?=(?!None)", file.read_text())
    ]
    assert {"agent.py", "training_process.py", "site.py", "golden.py"} <= {
        file.name for file in composing
    }
    begins = re.compile(
        r"(\*\*|environment\.update\(|environment = )(launchers\.without\()?os\.environ"
    )
    assert [file for file in composing if not begins.search(file.read_text())] == []


@pytest.mark.parametrize(
    ("file", "at"),
    [
        ("train.py", "torch.nn"),
        *(pytest.param(file, "", marks=pytest.mark.slow) for file in COMMANDS),
    ],
)
def test_ctrl_c_during_imports_is_one_line(file, at, tmp_path):
    """Started by its path from another folder: the repository's imports are found.

    Benchmarks are started by `-m`.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} if file.startswith("benchmarks") else None
    command = [sys.executable, "-c", INTERRUPTED, ROOT / file, at]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (FAILED, "", f"interrupted; {AGAIN}\n")


@pytest.mark.parametrize(
    ("shell", "code", "line"),
    [
        ('"$@" 2>&3 | true', DONE, ""),  # a reader that leaves, as `| head -1`
        ('exec "$@" >&- 2>&3', DONE, ""),
        (
            'exec "$@" >/dev/full 2>&3',
            FAILED,
            f"standard output: No space left on device; make room, then {AGAIN}\n",
        ),
    ],
)
def test_output_that_nobody_reads_is_dropped_and_without_room_one_line_names_it(shell, code, line):
    program = [sys.executable, ROOT / "train.py", "--dry-run"]
    command = ["bash", "-c", f"set -o pipefail; exec 3>&2; {shell}", "bash", *program]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (code, line)


# The objects of a module are let go of after Python has given up its handlers of signals.
ENDING = """
import os, signal, sys
from common.command import finish

class Late:
    def __del__(self, kill=os.kill, process=os.getpid(), number=int(sys.argv[1])):
        kill(process, number)

def main():
    if sys.argv[3] == "handled":
        signal.signal(int(sys.argv[1]), lambda *_: None)
    return int(sys.argv[2])

late = Late()
finish(main)
"""


@pytest.mark.parametrize(
    ("number", "code", "handled", "ended"),
    [
        (signal.SIGTERM, DONE, "handled", DONE),
        (signal.SIGTERM, STOPPED, "handled", STOPPED),
        (signal.SIGINT, STOPPED, "handled", STOPPED),
        (signal.SIGTERM, STOPPED, "not handled", STOPPED),  # a run listens until it is saved
        (signal.SIGUSR1, STOPPED, "not handled", STOPPED),
        (signal.SIGTERM, DONE, "not handled", -signal.SIGTERM),
    ],
)
def test_a_signal_while_python_shuts_down_leaves_a_run_its_exit_code(number, code, handled, ended):
    """A second SIGTERM often comes when the first has done its work."""
    arguments = [str(int(number)), str(code), handled]
    command = [sys.executable, "-c", ENDING, *arguments]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (found.returncode, found.stderr) == (ended, "")


def test_argparse_prints_one_line_too():
    ended = subprocess.run(
        [sys.executable, ROOT / "tools" / "curves.py", "--shape"], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr.count("\n")) == (WRONG_INPUT, 1)


def test_recipes_of_the_repository_are_found_from_elsewhere_and_those_that_are_there_come_first(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)

    def plan():
        assert train.main(["--config", "configs/quickstart.yaml", "--dry-run"]) == DONE
        return capsys.readouterr().out

    assert "64 = " in plan()
    own = tmp_path / "configs" / "quickstart.yaml"
    own.parent.mkdir()
    own.write_text(
        f"extends: {ROOT / 'configs' / 'quickstart.yaml'}\nbatch: {{global: 24, micro: 12}}\n"
    )
    assert "24 = " in plan()


FULL = (errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (OSError(*FULL), FAILED, f"page.html: No space left on device; make room, then {AGAIN}\n"),
        (
            OSError(*FULL, "/dev/shm/x"),
            FAILED,
            f"/dev/shm/x: No space left on device; make room, then {AGAIN}\n",
        ),
        (
            OSError(errno.EROFS, "Read-only"),
            FAILED,
            f"page.html: Read-only; fix this, then {AGAIN}\n",
        ),
        (KeyboardInterrupt(), FAILED, f"interrupted; {AGAIN}\n"),
        (ConfigError("a.yaml: wrong; mend it"), WRONG_INPUT, "a.yaml: wrong; mend it\n"),
        (MachineError("no way there; rerun"), FAILED, "no way there; rerun\n"),
        (ZeroDivisionError(), None, ""),
    ],
)
def test_an_error_is_one_line_with_its_place_and_a_fault_of_the_program_keeps_its_traceback(
    error, code, line, capsys
):
    @one_line()
    def main():
        with writing("page.html"):
            raise error

    if code is None:
        with pytest.raises(type(error)):
            main()
    else:
        assert main() == code
    assert capsys.readouterr().err == line


def test_a_tilde_behind_the_equals_sign_of_a_flag_is_the_home_folder(monkeypatch, capsys):
    """No shell expands it there."""
    monkeypatch.setenv("HOME", "/home/me")
    parser = command.Parser(prog="some.py")
    parser.add_argument("--output")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args(["--output=~/a b", "run.output=~/x", "~y"])
    assert (options.output, options.overrides) == ("/home/me/a b", ["run.output=~/x", "~y"])
    with pytest.raises(SystemExit):
        parser.parse_intermixed_args(["--output=~no-such-user/x"])
    assert capsys.readouterr().err.startswith(
        "some.py: --output: ~no-such-user is no home folder here; "
    )


def test_a_tilde_is_the_home_folder_also_where_argparse_parses_intermixed_words_by_itself(
    monkeypatch,
):
    """As it does from Python 3.12.8 and 3.13.1 on, without a call of parse_known_args."""

    def by_itself(parser, args=None, namespace=None):
        return argparse.Namespace(words=args), []

    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_intermixed_args", by_itself)
    options = command.Parser(prog="some.py").parse_intermixed_args(["a", "--output=~/b", "c"])
    assert options.words == ["a", "--output=/home/me/b", "c"]


def test_a_subcommand_takes_options_between_its_other_arguments(monkeypatch, capsys):
    monkeypatch.setenv("HOME", "/home/me")
    parser = command.Parser(prog="some.py")
    commands = parser.add_subparsers(
        required=True, metavar="pack", parser_class=command.SubcommandParser
    )
    packing = commands.add_parser("pack")
    packing.add_argument("places", nargs="+")
    packing.add_argument("--plan")
    packing.add_argument("--json", action="store_true")
    options = parser.parse_args(["pack", "a", "--plan=~/b", "c", "--json", "d"])
    assert (options.places, options.plan, options.json) == (["a", "c", "d"], "/home/me/b", True)
    for words, fault in (
        (["pack"], "some.py pack: the following arguments are required: places; "),
        (["pack", "a", "--other"], "some.py: unrecognized arguments: --other; see some.py --help"),
    ):
        with pytest.raises(SystemExit) as caught:
            parser.parse_args(words)
        assert caught.value.code == 2 and capsys.readouterr().err.startswith(fault)

"""Libraries are compiled once, kept where only this user writes, and loaded whole and where they
were made only."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from common import binaries, cpp_compiler, files
from common.cpp_compiler import CompilerError
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]  # not from tests.conftest, which loads torch
FLAGS = ("-shared", "-fPIC")
compiles = pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")

# Asked for its macros it has those of $PROCESSOR, too. Else it writes a line, waits and compiles.
COUNTING = """
case "$*" in *-dM*) exec c++ $PROCESSOR "$@";; esac
echo compiled >> {log}
{meanwhile}
exec c++ "$@"
"""
ASKING = """
import sys
from pathlib import Path
from common.cpp_compiler import library
print(library(Path(sys.argv[1]), ("answer",), ("-shared", "-fPIC")).answer())
"""


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "native"
    folder.mkdir()
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    (folder / "answer.cpp").write_text(
        '#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n'
    )
    return folder / "answer.cpp"


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """compiler(text): a script as CXX."""

    def make(text):
        path = tmp_path / "compiler"
        path.write_bytes(b"#!/bin/sh\n" + (text if isinstance(text, bytes) else text.encode()))
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    return make


@pytest.fixture
def count(compiler, tmp_path):
    """count(): how often the compiler compiled."""
    log = tmp_path / "log"
    log.touch()
    compiler(COUNTING.format(log=log, meanwhile=""))
    return lambda: len(log.read_text().splitlines())


def answer(source, functions=("answer",), flags=FLAGS):
    """What the library answers, asked as by a new process."""
    return cpp_compiler.library.__wrapped__(source, functions, flags).answer()


def folder():
    return files.user_cache() / "compiled"


def kept():
    (file,) = folder().glob("*.so")
    return file


@compiles
def test_a_library_is_compiled_once_and_kept_for_this_user_only(source, count):
    assert (answer(source), answer(source), count()) == (42, 42, 1)
    assert [path.name for path in folder().iterdir()] == [kept().name] and kept().name.startswith(
        "answer-"
    )
    assert (folder().stat().st_mode & 0o777, kept().stat().st_mode & 0o777) == (0o700, 0o600)


@compiles
def test_a_process_loads_a_library_once(source, count):
    loaded = [cpp_compiler.library(source, ("answer",), FLAGS) for _ in range(2)]
    assert loaded[0] is loaded[1] and count() == 1


def other_header(source, monkeypatch):
    (source.parent / "answer.h").write_text("#define ANSWER 43\n")


def other_source(source, monkeypatch):
    source.write_text(source.read_text().replace("ANSWER;", "ANSWER + 1;"))


def other_compiler(source, monkeypatch):
    monkeypatch.setenv("CXX", f"{os.environ['CXX']} -DNDEBUG")


def other_processor(source, monkeypatch):
    monkeypatch.setenv("PROCESSOR", "-D__AVX1024__=1")


@compiles
@pytest.mark.parametrize(
    ("change", "expected"),
    [(other_header, 43), (other_source, 43), (other_compiler, 42), (other_processor, 42)],
)
def test_whatever_a_library_depends_on_it_is_compiled_anew_for(
    monkeypatch, source, count, change, expected
):
    assert answer(source) == 42
    change(source, monkeypatch)
    assert (answer(source), answer(source), count()) == (expected, expected, 2)


@compiles
def test_so_it_is_for_other_flags_functions_and_another_file_of_the_folder(source, count):
    (source.parent / "copy.cpp").write_text(source.read_text())
    assert (answer(source), answer(source, flags=(*FLAGS, "-O1")), count()) == (42, 42, 2)
    with pytest.raises(CompilerError, match="made a library without question"):
        answer(source, functions=("answer", "question"))
    assert (answer(source.with_name("copy.cpp")), count(), len(list(folder().iterdir()))) == (
        42,
        4,
        3,
    )


@compiles
def test_what_is_edited_while_it_is_compiled_is_compiled_anew(source, compiler, tmp_path):
    header = source.parent / "answer.h"
    compiler(
        COUNTING.format(log=tmp_path / "log", meanwhile=f"echo '#define ANSWER 43' > {header}")
    )
    assert (answer(source), answer(source)) == (42, 43)


DAMAGE = {
    "truncated": lambda content: content[:-1],
    "half": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "a bit": lambda content: content[:700] + bytes([content[700] ^ 1]) + content[701:],
    "of another key": lambda content: content[:-32] + binaries.checksum("other", content[:-32]),
}


@compiles
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_not_loaded_and_replaced(source, count, damage):
    answer(source)
    whole = kept().read_bytes()
    kept().write_bytes(damage(whole))
    assert (answer(source), count()) == (42, 2)
    assert (answer(source), count()) == (42, 2)


@compiles
def test_a_library_that_cannot_be_loaded_here_is_compiled_anew(monkeypatch, source, count):
    """As on a host with an older C library that shares the cache."""
    keys = []
    make = binaries.digest
    monkeypatch.setattr(binaries, "digest", lambda *parts: keys.append(make(*parts)) or keys[-1])
    answer(source)
    kept().write_bytes(b"no library" + binaries.checksum(keys[0], b"no library"))
    assert (answer(source), count()) == (42, 2)


def others_may_write(monkeypatch):
    folder().chmod(0o770)


def of_another_user(monkeypatch):
    owner = folder().stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)


def file_of_others(monkeypatch):
    """As one that they moved there; the folder is this user's."""
    kept().chmod(0o666)


def pipe(monkeypatch):
    place = kept()
    place.unlink()
    os.mkfifo(place)


def relative(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", os.path.relpath(os.environ["XDG_CACHE_HOME"]))


@compiles
@pytest.mark.parametrize(
    "change", [others_may_write, of_another_user, file_of_others, pipe, relative]
)
def test_nothing_is_loaded_that_others_may_have_written(monkeypatch, source, count, change):
    answer(source)
    change(monkeypatch)
    assert (answer(source), count()) == (42, 2)


@compiles
@pytest.mark.parametrize("change", [others_may_write, of_another_user])
def test_nothing_is_written_where_others_write(monkeypatch, source, count, change):
    folder().mkdir(parents=True)
    change(monkeypatch)
    assert (answer(source), count(), list(folder().iterdir())) == (42, 1, [])


@compiles
def test_without_a_place_for_it_a_library_is_compiled_each_time(
    monkeypatch, source, count, tmp_path
):
    (tmp_path / "cache").write_text("in the way")
    assert (answer(source), answer(source), count()) == (42, 42, 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "full"))

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    assert (answer(source), answer(source), count(), list(folder().iterdir())) == (42, 42, 4, [])


@compiles
def test_processes_that_ask_at_once_compile_once(source, compiler, tmp_path):
    log = tmp_path / "log"
    compiler(COUNTING.format(log=log, meanwhile="sleep 2"))
    command = [sys.executable, "-c", ASKING, str(source)]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    assert [process.communicate()[0] for process in processes] == ["42\n"] * 3
    assert log.read_text() == "compiled\n" and list(folder().iterdir()) == [kept()]


@compiles
def test_a_process_waits_for_another_only_as_long_as_a_compiler_may_take(
    monkeypatch, source, compiler, tmp_path
):
    """Its own compiler then takes milliseconds, on a busy machine too: it copies."""
    subprocess.run(["c++", *FLAGS, str(source), "-o", str(tmp_path / "made")], check=True)
    copy = (
        'case "$*" in *-dM*) echo "#define A 1"; exit;; esac\nfor last; do :; done; cp {} "$last"'
    )
    compiler(copy.format(tmp_path / "made"))
    assert answer(source) == 42
    lock = kept().with_suffix(".lock")
    kept().unlink()
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(cpp_compiler, "_SECONDS", 1.0)
        start = time.monotonic()
        assert answer(source) == 42 and kept()
        assert time.monotonic() - start >= 1


@compiles
def test_it_goes_on_when_the_other_ends_without_a_library(source, count):
    answer(source)
    lock = kept().with_suffix(".lock")
    kept().unlink()
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        release = threading.Timer(0.5, fcntl.flock, (held, fcntl.LOCK_UN))
        release.start()
        assert (answer(source), count()) == (42, 2)
        assert not release.is_alive()
        release.join()


@compiles
def test_where_locks_do_not_work_each_compiles_for_itself(monkeypatch, source, count):
    def fail(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    assert (answer(source), answer(source), count()) == (42, 42, 1)
    assert list(folder().iterdir()) == [kept()]


@compiles
def test_what_was_not_used_for_longest_is_removed(monkeypatch, source, count):
    monkeypatch.setattr(cpp_compiler, "_MOST_FILES", 3)  # a lock is one of them
    places = []
    for number in range(3):
        (source.parent / "answer.h").write_text(f"#define ANSWER {number}\n")
        assert answer(source) == number
        (place,) = set(folder().iterdir()) - set(places)
        places.append(place)
        os.utime(place, (number, number))
        if number == 1:  # used once more
            (source.parent / "answer.h").write_text("#define ANSWER 0\n")
            assert (answer(source), count()) == (0, 2)
    assert not places[1].exists() and places[0].exists() and places[2].exists()


@compiles
def test_what_defines_no_macros_makes_nothing_for_other_processes(source, compiler):
    compiler('case "$*" in *-dM*) exit;; esac\nexec c++ "$@"')
    assert answer(source) == 42 and not folder().exists()


def test_a_compiler_that_misbehaves_is_ended_and_named(monkeypatch, source, compiler, tmp_path):
    """It hangs together with what it started, prints for ever or no UTF-8, makes nothing, asks for
    input, or cannot be named or started; asked for its macros already, or later."""
    cases = [
        (
            b"sleep 600 & echo $! > %s; wait" % bytes(tmp_path / "pid"),
            "was ended after 1 s without a result",
        ),
        (b"cat /dev/zero", "was ended after it had printed 1 MiB"),
        (b"printf 'fault: \\377\\033[1m\\n'; exit 3", "fault: \ufffd\x1b[1m"),
        (b"exit 3", "ended with 3 and printed nothing"),
        (b"cat; exit 4", "ended with 4 and printed nothing"),
    ]
    for text, words in cases:
        for later in (b"", b'case "$*" in *-dM*) echo "#define A 1"; exit;; esac\n'):
            compiler(later + text)
            # Long for those that end by themselves, on machines that have other work.
            monkeypatch.setattr(cpp_compiler, "_SECONDS", 1.0 if b"sleep" in text else 60.0)
            with pytest.raises(CompilerError) as caught:
                answer(source)
            assert words in str(caught.value)
            assert not folder().exists() or not list(folder().iterdir())
    compiler("exit 0")
    with pytest.raises(OSError, match=r"answer\.so"):
        answer(source)
    monkeypatch.setenv("CXX", "g++ '")
    with pytest.raises(CompilerError, match="CXX=g\\+\\+ ': No closing quotation"):
        answer(source)
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(FileNotFoundError, match="/no/such/compiler"):
        answer(source)
    child = int((tmp_path / "pid").read_text())
    wait_until(
        lambda: (
            not Path(f"/proc/{child}").exists()
            or "zombie" in Path(f"/proc/{child}/status").read_text()
        )
    )


@pytest.mark.parametrize(
    ("capability", "flag"), [("avx2", "-march=x86-64-v3"), ("default", "-march=native")]
)
def test_the_command_is_cxx_or_else_cpp_for_the_instructions_of_torch(
    monkeypatch, source, capability, flag
):
    """So a machine with AVX-512 can show what it would do without."""
    commands = []
    monkeypatch.setattr(
        cpp_compiler, "_run", lambda command, messages: commands.append(command) or b""
    )
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
    for name, words in (("", ["c++"]), ("ccache 'my g++'", ["ccache", "my g++"])):
        monkeypatch.setenv("CXX", name)
        with pytest.raises(OSError, match=r"answer\.so"):
            answer(source, flags=("-march=native", "-shared"))
        assert commands[-2][: len(words)] == commands[-1][: len(words)] == words
        assert [[each for each in command if "-march" in each] for command in commands[-2:]] == [
            [flag]
        ] * 2

"""Triton's programs for a model, compiled side by side before the first step.

Triton compiles a program as a kernel is first launched with arguments of such types, constants and
alignments. A B4 has some 180 programs, and one after the other they take more than a minute. Here
the launches of dry passes are recorded instead of started, and worker processes compile what they
need. They write it to Triton's cache on the disk, where the launches of training find it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from common import cores, locks, progress, text
from common.errors import first_line
from common.json_io import read_json
from engines import cache
from models.kernels import patching
from parallel.parent_death import bound_to_parent

# With fewer programs a launch compiles them sooner than a process could start.
_LEAST = 8
_EACH = 4  # programs of a process, at least
_MOST = 32  # processes; each takes some 600 MB
_SECONDS = 300.0  # for all programs, and to wait for another process of this machine
_NAME = "large-batch-efficientnet"


class Recorded(NamedTuple):
    """Programs that a function would have compiled.

    programs: in JSON, each with `target`, the kind of GPU, and `description`, Triton's own text.
    fault: what has ended the function early, or "".
    """

    programs: List[str]
    fault: str


def recorded(work: Callable[[], None]) -> Recorded:
    """Record the Triton programs that `work` would compile and launch; they are not launched.

    Their results are whatever lies in the memory. Programs that this process has compiled already
    are launched, and not recorded.

    This uses Triton's `knobs.runtime.jit_cache_hook`. Triton calls it before it compiles a program,
    with a description from which `JITFunction.preload` compiles the same one; where the hook returns
    True, Triton neither compiles nor launches. Nothing else knows how Triton specializes a kernel
    for its arguments. It was tried with Triton 3.6 and 3.8. Were the description to change, workers
    would fail and launches compile; tests/engines/test_ahead.py looks for the cache's hits.
    """
    import triton  # seldom needed, and not everywhere

    programs: Dict[str, None] = {}

    def record(**call: Any) -> bool:
        """Note a program, and tell Triton not to compile it."""
        description = call["compile"]["specialization_data"]
        # Not in the descriptions of Triton 3.6.
        target = dataclasses.asdict(triton.runtime.driver.active.get_current_target())
        programs[json.dumps({"target": target, "description": description})] = None
        return True

    runtime = triton.knobs.runtime
    before = runtime.jit_cache_hook
    runtime.jit_cache_hook = record
    fault = ""
    try:
        work()
    except Exception as error:
        # Memory, or an operator: the first step will show what is wrong.
        fault = first_line(error)
    finally:
        runtime.jit_cache_hook = before
    return Recorded(list(programs), fault)


def prepared(work: Callable[[], None]) -> Tuple[str, ...]:
    """Compile what `work` would compile, side by side, into Triton's cache.

    Processes of a machine that share the cache take turns, and find what the first has compiled.

    Args:
        work: launches kernels; see `recorded`.

    Returns:
        Lines for the user.
    """
    if not patching.available():
        return ()
    programs, fault = recorded(work)
    lines = []
    if fault:
        lines.append(f"Triton's programs were looked for, until: {fault}")
    known = _Known()
    if len(known.without(programs)) < _LEAST:
        return tuple(lines)
    with known.alone():
        wanted = known.without(programs)
        if len(wanted) >= _LEAST:
            lines.append(_compile(wanted, known))
    return tuple(lines)


class _Known:
    """Programs that have been compiled into Triton's cache: a file of their digests lies in it.

    So both are lost together. The cache itself has names that only a compilation makes.
    """

    def __init__(self) -> None:
        import triton

        self._version = triton.__version__
        self._folder = Path(triton.knobs.cache.dir)
        self._file = self._folder / f"{_NAME}.json"

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait while another process compiles."""
        waiting = progress.lines(lambda: "waiting for Triton's cache, which another process fills")
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            with waiting:
                stack.enter_context(locks.alone(self._folder / f"{_NAME}.lock", _SECONDS))
            yield

    def without(self, programs: Sequence[str]) -> List[str]:
        """Return those of the programs that are not known to be compiled."""
        digests = self._read()
        return [program for program in programs if self._digest(program) not in digests]

    def add(self, programs: Sequence[str]) -> None:
        """Note that programs are compiled."""
        digests = self._read() | {self._digest(program) for program in programs}
        cache.write(self._file, sorted(digests))

    def _read(self) -> Set[str]:
        try:
            return set(read_json(self._file))
        except (OSError, ValueError, TypeError):
            return set()

    def _digest(self, program: str) -> str:
        """Return a digest of what a program depends on: its kind of GPU is in its description."""
        from engines.ahead_worker import kernel_of

        # The source of the kernel and of all that it calls, as Triton reads them.
        source = kernel_of(json.loads(program)["description"]).cache_key
        return hashlib.sha256(f"{program}{source}{self._version}".encode()).hexdigest()


def _compile(programs: Sequence[str], known: _Known) -> str:
    """Compile programs, note those that are, and return a line for the user."""
    began = time.monotonic()
    count = max(1, min(cores.available(), _MOST, len(programs) // _EACH))
    faults = compiled(programs, count)
    done = [program for program in programs if faults.get(program) == ""]
    known.add(done)
    seconds = time.monotonic() - began
    by = text.count(count, "process", "processes")
    line = f"Triton: {text.count(len(done), 'program')} compiled in {seconds:.0f} s by {by}"
    left = len(programs) - len(done)
    if not left:
        return line
    texts = [fault for fault in faults.values() if fault]
    reason = texts[0] if texts else f"no answer after {_SECONDS:.0f} s"
    return f"{line}; {left} are left to their first launch: {reason}"


def compiled(programs: Sequence[str], count: int) -> Dict[str, str]:
    """Compile programs by processes that touch no GPU.

    Args:
        programs: see `Recorded`.
        count: of processes.

    Returns:
        By program why it failed, or ""; none for a program that nobody has answered for.
    """
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for program in programs:
        waiting.put(program)
    faults: Dict[str, str] = {}
    workers = [_Worker(waiting, faults) for _ in range(count)]

    def state() -> str:
        """Return how far they are."""
        return f"{len(faults)} of {len(programs)} Triton programs compiled"

    deadline = time.monotonic() + _SECONDS
    with progress.lines(state, lambda: len(faults) / len(programs)):
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        for worker in workers:
            worker.end()
            worker.join()
    return faults


class _Worker(threading.Thread):
    """A thread that has a process of its own compile one program after the other.

    The thread starts the process, which dies with the thread that started it.
    """

    def __init__(self, waiting: queue.SimpleQueue[str], faults: Dict[str, str]):
        """
        Args:
            waiting: programs that no worker has taken yet.
            faults: gets an answer for each program.
        """
        super().__init__(daemon=True)
        self._waiting = waiting
        self._faults = faults
        self._process: Optional[subprocess.Popen] = None
        self._ended = threading.Event()

    def run(self) -> None:
        """Compile until no program waits, or the process is of no use."""
        try:
            self._process = _started()
            while not self._ended.is_set():
                program = self._waiting.get_nowait()
                self._faults[program] = self._answer(self._process, program)
        except queue.Empty:
            pass
        except (OSError, ValueError):
            # The process has died or could not be started: others take what waits.
            pass
        finally:
            self._close()

    def end(self) -> None:
        """End the process, also within a program."""
        self._ended.set()
        if self._process is not None:
            self._process.kill()

    def _answer(self, process: subprocess.Popen, program: str) -> str:
        """Return why the process could not compile a program, or ""."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(f"{program}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError as error:
            answer = json.dumps(first_line(error))
        if not answer and self._ended.is_set():
            raise OSError("ended, as time is over")
        if not answer:
            self._ended.set()
            return f"a compiling process ended with exit code {process.wait()}"
        return json.loads(answer)

    def _close(self) -> None:
        process = self._process
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _started() -> subprocess.Popen:
    """Start a process that compiles."""
    environment = {
        **os.environ,
        # It finds the same modules as this process, wherever they are.
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        # It sees no GPU, so that it cannot start CUDA on one.
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        # Interpreted kernels have no programs.
        "TRITON_INTERPRET": "0",
    }
    command = [sys.executable, "-m", "engines.ahead_worker"]
    return subprocess.Popen(
        bound_to_parent(command, ignores_interrupts=True),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        env=environment,
    )

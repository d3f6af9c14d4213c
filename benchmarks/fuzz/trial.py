"""Reads inputs one after the other in a process of their own.

An input may let it crash or hang: another process goes on behind that input.
"""

import collections
import ctypes
import functools
import gc
import itertools
import os
import random
import statistics
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Iterator, List, NamedTuple, Optional, Tuple

import torch

from benchmarks import ranks
from benchmarks.fuzz.mutations import calls, mutated
from benchmarks.fuzz.targets import TARGETS
from benchmarks.processes import kilobytes

TAKEN = "taken"
REFUSED = "refused"
EXECUTED = "executed"
_HANGS = 20.0  # seconds that one input, or the making of whole files, may take
_SAMPLES = 100  # measurements of the memory, evenly spread over a target's inputs
_MEMORY = "/dev/shm"  # for the files, so that nothing waits for a disk
_ARENA_MAX = -8  # option of mallopt, in glibc's malloc.h


class Result(NamedTuple):
    """Outcome of an input.

    number: of the input.
    kind: taken, refused, crash, hang, executed, or an error's name.
    text: why it was neither taken nor refused.
    seconds: to make and read it.
    memory: of the process behind it, in kB, if it was measured.
    """

    number: int
    kind: str
    text: str = ""
    seconds: float = 0.0
    memory: Optional[float] = None


class _Sample(NamedTuple):
    """Memory of a process behind an input.

    number: of the input.
    memory: kB.
    """

    number: int
    memory: float


def made(name: str, seed: int, number: int, seeds: List[bytes]) -> bytes:
    """Make an input.

    Args:
        name: of the target.
        seed: of all inputs.
        number: of the input.
        seeds: whole files of the target.
    """
    make = TARGETS[name].make if name in TARGETS else mutated
    return make(seeds, random.Random(f"{seed} {name} {number}"))


def run(name: str, seed: int, inputs: int) -> Tuple[dict, List[Result]]:
    """Read the inputs of a target.

    Args:
        name: of the target.
        seed: of all inputs.
        inputs: how many there are.

    Returns:
        A row of the table, and the results that are neither taken nor refused.
    """
    # Another process begins behind the input at which the one before has ended.
    sessions: List[List[Result]] = []
    results: List[Result] = []
    while len(results) < inputs:
        session = list(_session(name, seed, len(results), inputs))
        sessions.append(session)
        results += session
    kinds = collections.Counter(result.kind for result in results)
    # Memory grows within a process: the one that lived longest says most about it.
    longest = max(sessions, key=len)
    row = {
        "read": name,
        "inputs": inputs,
        "taken": kinds[TAKEN],
        "refused": kinds[REFUSED],
        "crashed_hung_or_other": inputs - kinds[TAKEN] - kinds[REFUSED] - kinds[EXECUTED],
        "executed": kinds[EXECUTED],
        "slowest_s": round(max(result.seconds for result in results), 3),
        "growth_kb_per_1000": round(_growth(_samples(longest)), 1),
    }
    return row, [result for result in results if result.kind not in (TAKEN, REFUSED)]


def _session(name: str, seed: int, first: int, inputs: int) -> Iterator[Result]:
    """Yield the results of a process, up to the first input that it does not survive."""
    number = first
    function = functools.partial(_results, name, seed, first, inputs)
    try:
        for result in ranks.stream(_HANGS, function, way="fork", each=True):
            if result is not None:
                yield result
                number += 1
    except TimeoutError as error:
        yield Result(number, "hang", str(error))
    except RuntimeError as error:
        yield Result(number, "crash", str(error))


def _results(name: str, seed: int, first: int, inputs: int) -> Iterator[Optional[Result]]:
    """Read inputs in this process, from the first up to all; None comes once it is ready."""
    _prepare()
    between_samples = max(1, inputs // _SAMPLES)
    with tempfile.TemporaryDirectory(dir=_MEMORY if os.path.isdir(_MEMORY) else None) as place:
        folder = Path(place)
        seeds = TARGETS[name].seeds(folder)
        # The time of the first input begins here.
        yield None
        for number in range(first, inputs):
            began = time.monotonic()
            kind, text = _read(name, made(name, seed, number, seeds), folder)
            seconds = time.monotonic() - began
            memory = _held() if number % between_samples == 0 else None
            yield Result(number, kind, text, seconds, memory)


def _prepare() -> None:
    """Settle this process, so that its memory grows by what readers hold alone."""
    # Heaps of further threads grow by megabytes at times, and down again.
    ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)
    # What is inherited need not be looked through again at each look at the memory.
    gc.freeze()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # Libjpeg writes its messages to stderr.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _read(name: str, data: bytes, folder: Path) -> Tuple[str, str]:
    """Read an input; return the kind of its result and, if it is a fault, a text."""
    calls.clear()
    kind = TAKEN
    text = ""
    try:
        TARGETS[name].read(data, folder)
    except TARGETS[name].refuses:
        kind = REFUSED
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        kind = type(error).__name__
        text = f"{kind}: {str(error)[:200]} ({Path(last.filename).name}:{last.lineno})"
    # Whatever else it did.
    if calls:
        return EXECUTED, "the input ran code"
    return kind, text


def _held() -> float:
    """Return the memory of this process, in kB, after all that is free has been given back.

    What is left is held by somebody. Pages of files on disk do not count: rare damage runs parts of
    libraries that nothing before has run.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    fields = kilobytes("self", "status")
    return fields["RssAnon"] + fields["RssShmem"]


def _samples(results: List[Result]) -> List[_Sample]:
    """Return the memory behind those inputs for which it was measured."""
    return [
        _Sample(result.number, result.memory) for result in results if result.memory is not None
    ]


def _growth(samples: List[_Sample]) -> float:
    """Return the slope of the memory over the second half of a session, in kB per 1,000 inputs.

    The first half is warm-up: inputs that reach a piece of code for the first time fill caches,
    import modules and stretch the heap. Most of that comes within the first hundred inputs (7 MB
    with studies, then none over 1,500), but slow targets have only a few hundred. The slope is the
    median of the slopes between all pairs of samples (Theil, Sen): a steady leak is found whole,
    single inputs that hold much for a moment and one late step do not move it.
    """
    settled = samples[len(samples) // 2 :]
    slopes = [
        (last.memory - first.memory) / (last.number - first.number)
        for first, last in itertools.combinations(settled, 2)
    ]
    return 1000 * statistics.median(slopes) if slopes else 0.0

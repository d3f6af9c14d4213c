"""Inputs one after the other in a process of their own, which may crash or hang: another goes on behind that input."""

import collections
import ctypes
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

TAKEN, REFUSED, EXECUTED = "taken", "refused", "executed"
_HANGS = 20.0  # seconds that one input, or the making of whole files, may take
_SAMPLES = 100  # measurements of the memory, evenly spread over a target's inputs
_MEMORY = "/dev/shm"  # for the files, so that nothing waits for a disk
_ARENA_MAX = -8  # option of mallopt, in glibc's malloc.h


class Result(NamedTuple):
    """Outcome of an input. kind: taken, refused, crash, hang, executed, or an error's name. memory: kB, if measured."""

    number: int
    kind: str
    text: str = ""
    seconds: float = 0.0
    memory: Optional[float] = None


def made(name: str, seed: int, number: int, seeds: List[bytes]) -> bytes:
    make = TARGETS[name].made if name in TARGETS else mutated
    return make(seeds, random.Random(f"{seed} {name} {number}"))


def run(name: str, seed: int, inputs: int) -> Tuple[dict, List[Result]]:
    """A row of the table about a target's inputs, and those that were neither taken nor refused."""
    sessions: List[List[Result]] = []
    while sum(map(len, sessions)) < inputs:
        sessions.append(list(_session(name, seed, sum(map(len, sessions)), inputs)))
    results = list(itertools.chain.from_iterable(sessions))
    kinds = collections.Counter(each.kind for each in results)
    memory = [(each.number, each.memory) for each in max(sessions, key=len) if each.memory is not None]
    row = {
        "read": name,
        "inputs": inputs,
        "taken": kinds[TAKEN],
        "refused": kinds[REFUSED],
        "crashed_hung_or_other": inputs - kinds[TAKEN] - kinds[REFUSED] - kinds[EXECUTED],
        "executed": kinds[EXECUTED],
        "slowest_s": round(max(each.seconds for each in results), 3),
        "growth_kb_per_1000": round(_growth(memory), 1),
    }
    return row, [each for each in results if each.kind not in (TAKEN, REFUSED)]


def _session(name: str, seed: int, first: int, inputs: int) -> Iterator[Result]:
    """Results of a process, up to the first input that it does not survive."""
    number = first
    try:
        for result in ranks.stream(_HANGS, _results, name, seed, first, inputs, way="fork", each=True):
            if result is not None:
                yield result
                number += 1
    except (RuntimeError, TimeoutError) as error:
        yield Result(number, "hang" if isinstance(error, TimeoutError) else "crash", str(error))


def _results(name: str, seed: int, first: int, inputs: int) -> Iterator[Optional[Result]]:
    ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)  # heaps of further threads grow by megabytes at times, and down again
    gc.freeze()  # what is inherited need not be looked through again at each look at the memory
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # for libjpeg's messages
    every = max(1, inputs // _SAMPLES)
    with tempfile.TemporaryDirectory(dir=_MEMORY if os.path.isdir(_MEMORY) else None) as folder:
        seeds = TARGETS[name].seeds(Path(folder))
        yield None  # the time of the first input begins here
        for number in range(first, inputs):
            began = time.monotonic()
            kind, text = _read(name, made(name, seed, number, seeds), Path(folder))
            seconds = time.monotonic() - began
            yield Result(number, kind, text, seconds, _held() if number % every == 0 else None)


def _read(name: str, data: bytes, folder: Path) -> Tuple[str, str]:
    calls.clear()
    kind, text = TAKEN, ""
    try:
        TARGETS[name].read(data, folder)
    except TARGETS[name].refuses:
        kind = REFUSED
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        kind = type(error).__name__
        text = f"{kind}: {str(error)[:200]} ({Path(last.filename).name}:{last.lineno})"
    return (EXECUTED, "the input ran code") if calls else (kind, text)


def _held() -> float:
    """Memory of this process, in kB, after all has been given back that is free: what is left is held by somebody.

    Pages of files on disk do not count: rare damage runs parts of libraries that nothing before has run.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    fields = kilobytes("self", "status")
    return fields["RssAnon"] + fields["RssShmem"]


def _growth(memory: List[Tuple[int, float]]) -> float:
    """Slope of the memory over the second half of the longest session, in kB per 1,000 inputs.

    The first half is warm-up: inputs that reach a piece of code for the first time fill caches, import modules and
    stretch the heap. Most of that comes within the first hundred inputs (7 MB with studies, then none over 1,500), but
    slow targets have only a few hundred. The slope is the median of the slopes between all pairs of samples (Theil,
    Sen): a steady leak is found whole, single inputs that hold much for a moment and one late step do not move it.
    """
    settled = memory[len(memory) // 2 :]
    slopes = [(late - early) / (last - first) for (first, early), (last, late) in itertools.combinations(settled, 2)]
    return 1000 * statistics.median(slopes) if slopes else 0.0

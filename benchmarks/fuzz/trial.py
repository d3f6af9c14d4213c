"""Inputs one after the other in a process of their own, which may crash or hang: who watches it goes on behind that."""

from __future__ import annotations

import ctypes
import gc
import itertools
import multiprocessing
import os
import random
import statistics
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import List, NamedTuple, Optional

import torch

from benchmarks.fuzz import canary
from benchmarks.fuzz.mutations import mutated
from benchmarks.fuzz.targets import TARGETS
from parallel.parent_death import die_with_parent

EXECUTED = "executed"  # kind of a fault
_HANGS = 20.0  # seconds that one input may take
_START = 60.0  # seconds that a process may take to begin with its first
_SAMPLES = 100  # measurements of the memory, evenly spread over a target's inputs
_MEMORY = "/dev/shm"  # for the files, so that nothing waits for a disk
_ARENA_MAX = -8  # option of mallopt, in glibc's malloc.h


class Fault(NamedTuple):
    """An input that was neither taken nor refused, or ran code. kind: crash, hang, executed, or the error's name."""

    number: int
    kind: str
    text: str


class Sample(NamedTuple):
    """Memory of the reading process after an input."""

    number: int
    kilobytes: float


class Found(NamedTuple):
    """Outcome of a target's inputs. taken, refused: counts; slowest: seconds; growth: kB per 1,000 inputs."""

    inputs: int
    taken: int
    refused: int
    slowest: float
    growth: float
    faults: List[Fault]


def made(name: str, seed: int, number: int, seeds: List[bytes]) -> bytes:
    """Input `number` of a target."""
    return mutated(seeds, random.Random(f"{seed} {name} {number}"))


def run(name: str, seed: int, inputs: int) -> Found:
    """Gives a target its inputs."""
    context = multiprocessing.get_context("fork")
    faults: List[Fault] = []
    samples: List[List[Sample]] = []
    number, totals, slowest = 0, [0, 0], 0.0
    while number < inputs:
        place = context.Array("d", [number, time.monotonic() + _START], lock=False)
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(name, seed, number, inputs, place, writer))
        process.start()
        writer.close()
        report = _awaited(process, reader, place)
        number = int(place[0]) + 1
        if report is None:
            kind = "hang" if time.monotonic() - place[1] > _HANGS else "crash"
            faults.append(Fault(number - 1, kind, f"ended with {process.exitcode}"))
            continue
        taken, refused, longest, own, memory = report
        totals, slowest = [totals[0] + taken, totals[1] + refused], max(slowest, longest)
        faults += own
        samples.append(memory)
        number = inputs
    return Found(inputs, *totals, slowest, _growth(samples), faults)


def _awaited(process, reader, place) -> Optional[tuple]:
    """The message that a child sends at its end; None if it died, or hung and was killed."""
    while not reader.poll(0.2):
        if time.monotonic() - place[1] > _HANGS:
            process.kill()
            break
    try:
        return reader.recv()
    except EOFError:
        return None
    finally:
        process.join()


def _child(name: str, seed: int, first: int, inputs: int, place, writer) -> None:
    die_with_parent()
    ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)  # heaps of further threads grow by megabytes at times, and down again
    gc.freeze()  # what is inherited need not be looked through again at each look at the memory
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where libjpeg tells of all that it finds
    target, taken, refused, longest = TARGETS[name], 0, 0, 0.0
    faults: List[Fault] = []
    memory: List[Sample] = []
    every = max(1, inputs // _SAMPLES)
    with tempfile.TemporaryDirectory(dir=_MEMORY if os.path.isdir(_MEMORY) else None) as place_to_work:
        folder = Path(place_to_work)
        seeds = target.seeds(folder)
        for number in range(first, inputs):
            place[0], place[1] = number, time.monotonic()
            try:
                target.read(made(name, seed, number, seeds), folder)
                taken += 1
            except target.refuses:
                refused += 1
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                text = f"{type(error).__name__}: {str(error)[:200]} ({Path(last.filename).name}:{last.lineno})"
                faults.append(Fault(number, type(error).__name__, text))
            if canary.calls:
                faults.append(Fault(number, EXECUTED, "the input ran code"))
                canary.calls.clear()
            longest = max(longest, time.monotonic() - place[1])
            if number % every == 0:
                memory.append(Sample(number, _held()))
    writer.send((taken, refused, longest, faults, memory))
    writer.close()
    os._exit(0)


def _held() -> float:
    """Memory of this process, in kB, after all has been given back that is free: what is left is held by somebody.

    Pages of files on disk do not count: rare damage runs parts of libraries that nothing before has run.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(float(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def _growth(samples: List[List[Sample]]) -> float:
    """Slope of the memory over the second half of the longest run without a crash, in kB per 1,000 inputs.

    The first half is warm-up: inputs that reach a piece of code for the first time fill caches, import modules and
    stretch the heap. Most of that comes within the first hundred inputs (7 MB with studies, then none over 1,500), but
    slow targets have only a few hundred. The slope is the median of the slopes between all pairs of samples (Theil,
    Sen): a steady leak is found whole, single inputs that hold much for a moment and one late step do not move it.
    """
    longest = max(samples, key=len, default=[])
    settled = longest[len(longest) // 2 :]
    slopes = [
        (after.kilobytes - before.kilobytes) / (after.number - before.number)
        for before, after in itertools.combinations(settled, 2)
    ]
    return 1000 * statistics.median(slopes) if slopes else 0.0

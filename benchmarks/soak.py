"""Does a long run grow? Ten thousand updates with a checkpoint and an evaluation about every hundred.

    python -m benchmarks.soak [--quick] [--json]

One process with a worker that loads its images, and two replicas, each a real run on the digits;
while they train, memory (anonymous or shared pages; inherited ones count for each process, because
they become two once either writes), open files and threads of all their processes are read from
/proc. glibc's allocator gives back what is free. Claims are slopes: least squares over the updates,
without the first tenth (with --quick the first half), in which caches fill.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence, Tuple

from benchmarks import QUIET, ROOT, claims
from benchmarks.processes import kilobytes, tree
from parallel import launchers
from parallel.parent_death import bound_to_parent

STEPS = 10_000
_LOGGED = 50  # updates between two lines of the run's log
# 102 updates an epoch, at the end of which the run is scored and saved.
RECIPE = (
    "run.device=cpu",
    "model.width=0.25",
    "model.depth=0.1",
    "model.image_size=12",
    "batch.global=14",
    "batch.micro=7",
    "batch.evaluation=360",
    "schedule.warmup_steps=100",
    f"log.every_steps={_LOGGED}",
    "average.step_decay=0.99",
)
# Of glibc: as it is by default, a heap steps up by megabytes at times, and down again, as pieces
# happen to lie.
_GIVING_BACK = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
GOALS = {  # growth in 1,000 updates
    "memory_kb": "<= 256",
    "files": "<= 0.05",
    "threads": "<= 0.05",
}
_SAMPLE_SECONDS = 1.0


class Run(NamedTuple):
    """A run that is watched.

    flags: of the launcher.
    overrides: of the recipe.
    """

    flags: Tuple[str, ...]
    overrides: Tuple[str, ...]


RUNS: Dict[str, Run] = {
    "one process, one worker": Run(
        flags=(),
        overrides=("data.workers=1",),
    ),
    "two replicas": Run(
        flags=("--replicas", "2"),
        overrides=("exchange.method=dense",),
    ),
}


class Sample(NamedTuple):
    """Resources of all processes of a run at one moment.

    step: that the run had reached.
    memory_kb: pages that a process has inherited count for each.
    files: that are open.
    """

    step: int
    memory_kb: float
    files: float
    threads: float


def steps() -> int:
    """Return the updates of a run."""
    return claims.less(STEPS, 500)


def warm_up() -> float:
    """Return the updates that do not count.

    They are more than two epochs, by whose ends all that a run needs has been started.
    """
    return steps() * claims.less(0.1, 0.5)


def measure(run: Run, folder: Path) -> List[Sample]:
    """Train a run and look at it every second.

    Args:
        run: that is trained.
        folder: of the run.

    Returns:
        The samples from the first line of its log on.

    Raises:
        CalledProcessError: the run failed.
    """
    command = [
        sys.executable,
        "-m",
        "tools.launch",
        *run.flags,
        "--config",
        "configs/quickstart.yaml",
        *RECIPE,
        *run.overrides,
        *QUIET,
        f"run.steps={steps()}",
        f"run.output={folder}",
    ]
    environment = launchers.without(os.environ)
    environment.update(_GIVING_BACK)
    environment["OMP_NUM_THREADS"] = "1"
    with subprocess.Popen(
        bound_to_parent(command),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
    ) as process:
        try:
            samples = _samples(process, folder / "metrics.jsonl")
        finally:
            # After an error the end of the context would wait for the whole training.
            process.kill()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    # Later ones are of a run that is ending.
    return [taken for taken in samples if taken.step < steps()]


def _samples(process: subprocess.Popen[bytes], log: Path) -> List[Sample]:
    """Look at a run every second until it ends.

    Args:
        process: of the run, with its other processes below it.
        log: of the run.
    """
    samples = []
    while process.poll() is None:
        step = _reached(log)
        if step:
            samples.append(sample(process.pid, step))
        time.sleep(_SAMPLE_SECONDS)
    return samples


def _reached(log: Path) -> int:
    """Return the updates that a run has made, by the lines of its log; 0 before the first."""
    if not log.exists():
        return 0
    lines = log.read_bytes().count(b'"event": "train"')
    return _LOGGED * lines


def sample(root: int, step: int) -> Sample:
    """Read the resources of a process and all below it.

    Args:
        root: the process.
        step: that the run has reached.
    """
    memory = 0
    files = 0
    threads = 0
    for process in tree(root):
        # It may be gone by now, or amid this: then nothing of it counts.
        with contextlib.suppress(OSError):
            used = kilobytes(process, "smaps_rollup")
            open_files = _entries(f"/proc/{process}/fd")
            tasks = _entries(f"/proc/{process}/task")
            memory += used["Anonymous"] + used["Pss_Shmem"]
            files += open_files
            threads += tasks
    return Sample(step, memory, files, threads)


def _entries(folder: str) -> int:
    """Count the entries of a folder. Raises OSError: it is not there."""
    return len(list(Path(folder).iterdir()))


def slope(samples: Sequence[Sample], name: str) -> float:
    """Return how much a resource grows in 1,000 updates, after the warm-up.

    Args:
        samples: of a run.
        name: of the resource, as GOALS and `Sample` have it.
    """
    late = [taken for taken in samples if taken.step >= warm_up()]
    reached = [taken.step for taken in late]
    amounts = [getattr(taken, name) for taken in late]
    return 1000 * statistics.linear_regression(reached, amounts).slope


def main() -> None:
    """Measure all runs, and print their growth and the claims on it."""
    options = claims.begin(__doc__, takes="10 minutes", quick="2 minutes")
    rows = []
    made = []
    for name, run in claims.progress(list(RUNS.items()), "run"):
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            samples = measure(run, Path(folder) / "run")
        row = {
            "run": name,
            "updates": steps(),
            "samples": len(samples),
            **samples[-1]._asdict(),
        }
        word = name.replace(", ", "_").replace(" ", "_")  # of the run, in names of claims
        for resource, goal in GOALS.items():
            growth = slope(samples, resource)
            row[f"{resource}_per_1000"] = growth
            # Without its unit.
            noun = resource.partition("_")[0]
            claim = claims.claim(f"{noun}_{word}", [growth], "per 1,000 updates", goal=goal)
            made.append(claim)
        rows.append(row)
    claims.report("soak", rows, made, as_json=options.json)

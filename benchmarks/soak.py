"""Does a long run grow? Ten thousand updates with a checkpoint and an evaluation about every hundred.

    python -m benchmarks.soak [--quick] [--json]

One process with a worker that loads its images, and two replicas, each a real run on the digits; while they train,
memory (anonymous or shared pages; inherited ones count for each process, because they become two once either writes),
open files and threads of all their processes are read from /proc. glibc's allocator gives back what is free. Claims are
slopes: least squares over the updates, without the first tenth (with --quick the first half), in which caches fill.
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
    "run.device=cpu", "model.width=0.25", "model.depth=0.1", "model.image_size=12",
    "batch.global=14", "batch.micro=7", "batch.evaluation=360", "schedule.warmup_steps=100",
    f"log.every_steps={_LOGGED}", "average.step_decay=0.99",
)  # fmt: skip
RUNS: Dict[str, Tuple[Sequence[str], Sequence[str]]] = {  # name -> flags of the launcher, overrides
    "one process, one worker": ((), ("data.workers=1",)),
    "two replicas": (("--replicas", "2"), ("exchange.method=dense",)),
}
# Of glibc: as it is by default, a heap steps up by megabytes at times, and down again, as pieces happen to lie.
_GIVING_BACK = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
GOALS = {"memory_kb": "<= 256", "files": "<= 0.05", "threads": "<= 0.05"}  # growth in 1,000 updates
_SAMPLE_SECONDS = 1.0


class Sample(NamedTuple):
    """Resources of all processes of a run at one moment; pages that a process has inherited count for each."""

    step: int
    memory_kb: float
    files: float
    threads: float


def steps() -> int:
    return claims.less(STEPS, 500)


def warm_up() -> float:
    """Updates that do not count; more than two epochs, by whose ends all that a run needs has been started."""
    return steps() * claims.less(0.1, 0.5)


def measure(flags: Sequence[str], overrides: Sequence[str], folder: Path) -> List[Sample]:
    """Trains a run and looks at it every second. Raises CalledProcessError where it fails."""
    command = [
        *(sys.executable, "-m", "tools.launch", *flags, "--config", "configs/quickstart.yaml"),
        *(*RECIPE, *overrides, *QUIET, f"run.steps={steps()}", f"run.output={folder}"),
    ]
    samples: List[Sample] = []
    environment = {**launchers.without(os.environ), **_GIVING_BACK, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(bound_to_parent(command), cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            log = folder / "metrics.jsonl"
            step = _LOGGED * (log.read_bytes().count(b'"event": "train"') if log.exists() else 0)
            if step:
                samples.append(sample(process.pid, step))
            time.sleep(_SAMPLE_SECONDS)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return [each for each in samples if each.step < steps()]  # later ones are of a run that is ending


def sample(root: int, step: int) -> Sample:
    """Resources of a process and all below it."""
    memory = files = threads = 0
    for process in tree(root):
        with contextlib.suppress(OSError):
            place, used = Path(f"/proc/{process}"), kilobytes(process, "smaps_rollup")
            memory += used["Anonymous"] + used["Pss_Shmem"]
            files += len(list((place / "fd").iterdir()))
            threads += len(list((place / "task").iterdir()))
    return Sample(step, memory, files, threads)


def slope(samples: Sequence[Sample], name: str) -> float:
    late = [each for each in samples if each.step >= warm_up()]
    fitted = statistics.linear_regression([each.step for each in late], [getattr(each, name) for each in late])
    return 1000 * fitted.slope


def main() -> None:
    as_json = claims.begin(__doc__, takes="10 minutes", quick="2 minutes").json
    rows, made = [], []
    for name, (flags, overrides) in claims.progress(list(RUNS.items()), "run"):
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            samples = measure(flags, overrides, Path(folder) / "run")
        word = name.replace(", ", "_").replace(" ", "_")
        row = {"run": name, "updates": steps(), "samples": len(samples), **samples[-1]._asdict()}
        for key, goal in GOALS.items():
            grown = row[f"{key}_per_1000"] = slope(samples, key)
            made.append(claims.claim(f"{key.partition('_')[0]}_{word}", [grown], "per 1,000 updates", goal))
        rows.append(row)
    claims.report("soak", rows, made, as_json)

"""The bits that tiny runs end with, in this checkout and in an earlier one: a refactoring must not change them.

    python -m benchmarks.golden [--against REVISION] [--json]

Each case is a whole run of the quickstart recipe, started as users start it, so any revision with these commands can be
compared. Sums depend on the CPU and on torch, so both sides are computed here and now and none is kept.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, Iterable, Iterator, NamedTuple, Tuple

import torch

from benchmarks import ROOT, claims
from common.errors import UserError
from parallel import launchers
from parallel.parent_death import bound_to_parent

_TINY = (
    "run.device=cpu", "run.epochs=2", "model.width=0.25", "model.depth=0.1", "model.dropout=0.3", "model.drop_path=0.3",
    "model.image_size=16", "batch.global=240", "batch.micro=20", "batch.evaluation=90", "schedule.warmup_epochs=1",
    "data.augment=randaugment", "data.cutmix=0.85", "average.step_decay=0.9", "log.tensorboard=false",
)  # fmt: skip
_CUT = ("parallel.split=[blocks.3.0]",)


class Case(NamedTuple):
    """A run: overrides of the quickstart, and its processes."""

    overrides: Tuple[str, ...] = ()
    replicas: int = 1
    stages: int = 1
    ipu: bool = False


CASES: Dict[str, Case] = {
    "half weights": Case(),
    "float32 weights": Case(("precision.weights=float32",)),
    "trust of the momentum": Case(("optimizer.trust=momentum",)),
    "rmsprop": Case(("optimizer.name=rmsprop", "schedule.peak=0.01")),
    "2 stages x 2 replicas, tree order": Case(("exchange.order=tree", *_CUT), 2, 2),
    "1f1b with recomputation": Case(("parallel.schedule=1f1b", "parallel.recompute=true", *_CUT), 1, 2),
    "gtopk": Case(
        ("optimizer.name=sgd", "schedule.peak=0.01", "exchange.method=gtopk", "exchange.density=0.01", *_CUT), 2, 2
    ),
    "topk, one step late": Case(("exchange.method=topk", "exchange.density=0.01", "exchange.delay=1"), 2),
    "PopTorch's double": Case(
        ("run.device=ipu", "optimizer.trust=momentum", "data.mixup=0", "data.cutmix=null", "average.step_decay=null"),
        ipu=True,
    ),
}


def digest_of(trees: Iterable[dict]) -> str:
    """SHA-256 of names, dtypes, shapes and values of all tensors in nested dictionaries, such as checkpoints.

    In the order of the names within each tree; equal only if all bits are.
    """
    found = hashlib.sha256()
    for tree in trees:
        for name, tensor in sorted(_tensors(tree)):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _tensors(tree: object, name: str = "") -> Iterator[Tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield name, tree
    for key, branch in tree.items() if isinstance(tree, dict) else ():
        yield from _tensors(branch, f"{name}/{key}")


def digest(checkout: Path, case: Case) -> str:
    """SHA-256 of every tensor that the case's run leaves when it is trained by the program in `checkout`.

    Raises:
        UserError: the run failed; its output is in the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        launch = ["-m", "tools.launch", "--replicas", str(case.replicas), "--stages", str(case.stages)]
        start = ["train.py"] if case.replicas == case.stages == 1 else launch
        recipe = ["--config", "configs/quickstart.yaml", *_TINY, *case.overrides, f"run.output={run}"]
        environment = {**launchers.without(os.environ), "OMP_NUM_THREADS": "1"}
        if case.ipu:
            environment["PYTHONPATH"] = str(checkout / "tests" / "ipu" / "double")
        command = bound_to_parent([sys.executable, *start, *recipe])
        ended = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        if ended.returncode:
            raise UserError(f"{checkout}: {' '.join(case.overrides)}: {ended.stdout}{ended.stderr}")
        newest = max((run / "checkpoints").glob("step-????????.pt"))
        files = [newest, *sorted(newest.parent.glob(f"{newest.stem}.replica-*.pt"))]
        return digest_of(torch.load(file, weights_only=True) for file in files)


@contextlib.contextmanager
def checkout_of(revision: str) -> Iterator[Path]:
    """The program as it was at a revision, in a folder that is removed again. Raises UserError."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.run([*git, "add", "--detach", folder, revision], capture_output=True, text=True)
        if made.returncode:
            raise UserError(f"--against {revision}: {made.stderr.strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True, capture_output=True)


def main() -> None:
    parser = claims.parser(__doc__)
    parser.add_argument("--against", metavar="REVISION", help="also train with the program of this git revision")
    arguments = claims.begin(parser, takes="3 minutes, twice that with --against", quick="1 minute")
    cases = claims.less(list(CASES.items()), list(CASES.items())[:2])
    with contextlib.ExitStack() as stack:
        sides = {"here": ROOT}
        if arguments.against:
            sides["there"] = stack.enter_context(checkout_of(arguments.against))
        rows = [
            {"case": name, **{side: digest(checkout, case) for side, checkout in sides.items()}}
            for name, case in claims.progress(cases, "case")
        ]
    found = []
    if arguments.against:
        equal = sum(row["here"] == row["there"] for row in rows) / len(rows)
        found = [claims.claim("cases_with_equal_bits", [equal], "of all", ">= 1")]
    claims.report("golden", rows, found, arguments.json)

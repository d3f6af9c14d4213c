"""The bits that tiny runs end with, in this checkout and in an earlier one: a refactoring must not change them.

    python -m benchmarks.golden [--against REVISION] [--quick] [--json]

Each case is a whole run of the quickstart recipe, started as users start it, so any revision with
these commands can be compared. Sums depend on the CPU and on torch, so both sides are computed here
and now and none is kept.
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
from typing import Dict, Iterable, Iterator, List, NamedTuple, Tuple

import torch

from benchmarks import ROOT, claims
from common.errors import UserError
from parallel import launchers
from parallel.parent_death import bound_to_parent

# Small, with all on that draws or keeps numbers of its own: dropout, augmentation, mixing, averages.
_TINY = (
    "run.device=cpu",
    "run.epochs=2",
    "model.width=0.25",
    "model.depth=0.1",
    "model.dropout=0.3",
    "model.drop_path=0.3",
    "model.image_size=16",
    "batch.global=240",
    "batch.micro=20",
    "batch.evaluation=90",
    "schedule.warmup_epochs=1",
    "data.augment=randaugment",
    "data.cutmix=0.85",
    "average.step_decay=0.9",
    "log.tensorboard=false",
)
_CUT = "parallel.split=[blocks.3.0]"


class Case(NamedTuple):
    """A run.

    overrides: of the quickstart.
    replicas, stages: its processes.
    ipu: it runs on the double of PopTorch that the tests have.
    """

    overrides: Tuple[str, ...] = ()
    replicas: int = 1
    stages: int = 1
    ipu: bool = False


CASES: Dict[str, Case] = {
    "half weights": Case(),
    "float32 weights": Case(("precision.weights=float32",)),
    "trust of the momentum": Case(("optimizer.trust=momentum",)),
    "rmsprop": Case(("optimizer.name=rmsprop", "schedule.peak=0.01")),
    "2 stages x 2 replicas, tree order": Case(
        ("exchange.order=tree", _CUT),
        replicas=2,
        stages=2,
    ),
    "1f1b with recomputation": Case(
        ("parallel.schedule=1f1b", "parallel.recompute=true", _CUT),
        stages=2,
    ),
    "gtopk": Case(
        (
            "optimizer.name=sgd",
            "schedule.peak=0.01",
            "exchange.method=gtopk",
            "exchange.density=0.01",
            _CUT,
        ),
        replicas=2,
        stages=2,
    ),
    "topk, one step late": Case(
        ("exchange.method=topk", "exchange.density=0.01", "exchange.delay=1"),
        replicas=2,
    ),
    "PopTorch's double": Case(
        (
            "run.device=ipu",
            "optimizer.trust=momentum",
            "data.mixup=0",
            "data.cutmix=null",
            "average.step_decay=null",
        ),
        ipu=True,
    ),
}


def digest_of(trees: Iterable[dict]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and values of all tensors in some trees.

    It is equal only if all bits are.

    Args:
        trees: nested dictionaries, such as checkpoints; their order counts, that of the names
            within each does not.
    """
    digest = hashlib.sha256()
    for tree in trees:
        for name, tensor in sorted(_tensors(tree)):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            values = tensor.contiguous().view(-1).view(torch.uint8)
            digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def _tensors(tree: object, name: str = "") -> Iterator[Tuple[str, torch.Tensor]]:
    """Yield the tensors in nested dictionaries with their paths; other values are left out."""
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, dict):
        for key, branch in tree.items():
            yield from _tensors(branch, f"{name}/{key}")


def digest(checkout: Path, case: Case) -> str:
    """Train a case, and return the SHA-256 of all tensors of its newest checkpoint.

    Args:
        checkout: whose program trains.
        case: the run.

    Raises:
        UserError: the run failed; its output is in the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = bound_to_parent([sys.executable, *_training(case, run)])
        ended = subprocess.run(
            command,
            cwd=checkout,
            env=_environment(checkout, case),
            capture_output=True,
            text=True,
        )
        if ended.returncode:
            overrides = " ".join(case.overrides)
            raise UserError(f"{checkout}: {overrides}: {ended.stdout}{ended.stderr}")
        # Weights, the optimizer's state, averages, and what each replica keeps for itself.
        files = _newest_checkpoint(run)
        return digest_of(torch.load(file, weights_only=True) for file in files)


def _training(case: Case, run: Path) -> List[str]:
    """Return the command that trains a case, as Python is given it.

    Args:
        case: the run.
        run: the folder of the run.
    """
    if case.replicas == case.stages == 1:
        start = ["train.py"]
    else:
        start = ["-m", "tools.launch"]
        start += ["--replicas", str(case.replicas)]
        start += ["--stages", str(case.stages)]
    recipe = ["--config", "configs/quickstart.yaml", *_TINY, *case.overrides]
    return [*start, *recipe, f"run.output={run}"]


def _environment(checkout: Path, case: Case) -> Dict[str, str]:
    """Return the variables of a run that is none of several, of one thread."""
    environment = launchers.without(os.environ)
    # Sums depend on how many threads there are.
    environment["OMP_NUM_THREADS"] = "1"
    if case.ipu:
        environment["PYTHONPATH"] = str(checkout / "tests" / "ipu" / "double")
    return environment


def _newest_checkpoint(run: Path) -> List[Path]:
    """Return the files of a run's newest checkpoint: that of all, then those of the replicas."""
    newest = max((run / "checkpoints").glob("step-????????.pt"))
    of_replicas = newest.parent.glob(f"{newest.stem}.replica-*.pt")
    return [newest, *sorted(of_replicas)]


@contextlib.contextmanager
def checkout_of(revision: str) -> Iterator[Path]:
    """Check out the program as it was at a revision, in a folder that is removed again.

    Args:
        revision: as git names it.

    Raises:
        UserError: there is no such revision.
    """
    worktree = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        added = subprocess.run(
            [*worktree, "add", "--detach", folder, revision],
            capture_output=True,
            text=True,
        )
        if added.returncode:
            raise UserError(f"--against {revision}: {added.stderr.strip()}")
        try:
            yield Path(folder)
        finally:
            # Not the folder alone: git keeps a list of its worktrees.
            remove = [*worktree, "remove", "--force", folder]
            subprocess.run(remove, check=True, capture_output=True)


def main() -> None:
    """Train all cases, and print their sums; with --against a claim on equal bits."""
    parser = claims.parser(__doc__)
    parser.add_argument(
        "--against",
        metavar="REVISION",
        help="also train with the program of this git revision",
    )
    options = claims.begin(parser, takes="3 minutes, twice that with --against", quick="1 minute")
    cases = list(CASES.items())
    cases = claims.less(cases, cases[:2])
    with contextlib.ExitStack() as stack:
        sides = {"here": ROOT}
        if options.against:
            sides["there"] = stack.enter_context(checkout_of(options.against))
        rows = []
        for name, case in claims.progress(cases, "case"):
            row = {"case": name}
            for side, checkout in sides.items():
                row[side] = digest(checkout, case)
            rows.append(row)
    made = []
    if options.against:
        equal = [row for row in rows if row["here"] == row["there"]]
        share = len(equal) / len(rows)
        made.append(claims.claim("cases_with_equal_bits", [share], "of all", goal=">= 1"))
    claims.report("golden", rows, made, as_json=options.json)

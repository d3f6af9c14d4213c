"""Engines on several ranks.

Cases of a test file with the same stages and replicas share one world, whose ranks take seconds to
start. Of other files, which another process may run, they compute nothing.

A case is a function(processes, *arguments) at the top level of its module, which every rank calls.
It returns what all ranks must agree on, a digest of the rank's own weights, and the outcome, of
which the main rank's counts.
"""

import functools
import hashlib
import sys
from typing import Any, Callable, NamedTuple

import pytest
import torch

from data.batches import MicroBatch
from engines import base, factory
from engines.base import one_step
from models.efficientnet import build
from parallel.processes import Processes
from parallel.topology import Topology
from recipe import loading
from recipe.batch import divide
from tests import world
from tests.conftest import QUICKSTART, TINY
from tests.engines.noise import as_micro_batches, noise_images
from tests.tensors import flat

# Every kind of random draw is on, and both averages. 6 = 3 x 2 micro batches: 1 and 2 replicas
# continue one tree.
DRAWS = (
    "model.dropout=0.3 model.drop_path=0.3 data.mixup=0.2 data.cutmix=0.85 data.label_smoothing=0.1"
)
SIZES = "batch.global=12 batch.micro=2 batch.evaluation=6 average.step_decay=0.9 average.epoch_decay=0.9"
RECIPE = (*TINY, "run.device=cpu", *SIZES.split(), *DRAWS.split())
FLOAT32 = ("precision.weights=float32",)
TREE = "exchange.order=tree"
CPU = torch.device("cpu")


class Case(NamedTuple):
    """A function of all ranks of a topology, and its arguments. file: the module of its test."""

    file: str
    stages: int
    replicas: int
    slow: bool
    function: Callable
    arguments: tuple


_cases = {}  # by file, stages, replicas and whether they are slow
_outcomes = {}  # of each rank


def case(stages, replicas, function, *arguments, slow=False):
    """A parameter of a test.

    The world of its topology computes it together with the others that are as fast.

    Arguments that are functions are called before that, in the process of the tests.
    """
    made = Case(
        sys._getframe(1).f_globals["__name__"],
        stages,
        replicas,
        slow=slow,
        function=function,
        arguments=arguments,
    )
    _cases.setdefault(made[:4], []).append(made)
    return pytest.param(made, marks=pytest.mark.slow) if slow else made


def outcome(found: Case) -> Any:
    """The main rank's; all ranks agree, and replicas of a stage have the same weights."""
    cases = _cases[found[:4]]
    stages = found.stages
    if found[:4] not in _outcomes:
        calls = [
            (each.function, [part() if callable(part) else part for part in each.arguments])
            for each in cases
        ]
        _outcomes[found[:4]] = world.run(
            stages * found.replicas, _rank, stages, calls, connect=False, timeout=600
        )
    number = next(number for number, each in enumerate(cases) if each is found)
    ranks = [of_rank[number] for of_rank in _outcomes[found[:4]]]
    for rank, (common, own, _) in enumerate(ranks):
        assert repr(common) == repr(ranks[0][0])  # NaN is NaN
        assert own == ranks[rank % stages][1]
    return ranks[0][2]


def _rank(rank, size, stages, calls):
    processes = Processes(Topology(size // stages, stages, rank, rank), CPU)
    found = [function(processes, *arguments) for function, arguments in calls]
    processes.part()
    return found


def digest(tree):
    """Of the bytes of a nested dictionary of tensors."""
    return hashlib.sha256(
        b"".join(tensor.numpy().tobytes() for tensor in flat(tree).values())
    ).hexdigest()


# What engines compute -----------------------------------------------------------------------------


def recipe_of(overrides):
    return loading.load(QUICKSTART, [*RECIPE, *overrides])


def engine_of(processes, overrides, steps_per_epoch=None):
    """The engine of a recipe.

    Two stages are cut at one place unless the overrides say how: no block is measured.
    """
    stages = processes.topology.stages
    keys = [f"parallel.stages={stages}"]
    if stages == 2 and "parallel.schedule=interleaved" not in overrides:
        keys.append("parallel.split=[blocks.3.0]")
    recipe = recipe_of((*keys, *overrides))
    return factory.create(
        recipe, divide(recipe, processes.topology.replicas), processes, steps_per_epoch
    )


def single():
    """The processes of a run of one."""
    return Processes(Topology(), CPU)


def micro_batches(step, engine, size=16):
    """This replica's share of the step's images, on its first stage."""
    if not engine.topology.is_first:
        return iter(())
    batch = engine.batch
    share = engine.batch.shares[engine.topology.replica]
    whole = list(as_micro_batches(*noise_images(batch.global_, step, size=size), batch.micro, step))
    return iter(whole[share.start : share.stop])


def evaluation(engine):
    """Scores of 20 images in batches of 6, the last with 2, on whichever ranks they enter."""
    images, labels = noise_images(24, 99)
    rows = 6
    place = engine.topology
    counts = []
    for number in range(
        4 * place.replica // place.replicas, 4 * (place.replica + 1) // place.replicas
    ):
        batch = None
        if place.is_first:
            own = slice(number * rows, (number + 1) * rows)
            valid = min(rows, 20 - number * rows)
            batch = MicroBatch(
                images[own],
                labels[own],
                labels[own],
                valid=valid,
                number=number,
                step=0,
                unreadable=(),
            )
        counts.append(engine.evaluate_step(batch))
    found, _ = base.total(counts, [], engine.processes, engine.device)
    return found.images, found.loss.item(), found.top1.item(), found.top5.item()


def train(engine, first=0, steps=3, sizes=(16,), saved=None, lr=2.0, poisoned=None):
    """Results of steps, scores, and the state where it is gathered. poisoned: rank with a NaN in
    step 1."""
    if saved is not None:
        engine.load_state_dict(saved)
    if engine.topology.rank == poisoned:
        poison(engine)
    results = []
    for step in range(first, first + steps):
        batches = micro_batches(step, engine, sizes[step % len(sizes)])
        result = engine.train_step(batches, one_step(step), lr, measure=True)
        norms = {
            name: getattr(result.norms, name).item() for name in ("gradient", "weight", "update")
        }
        trust = {name: ratio.item() for name, ratio in result.norms.trust.items()}
        results.append(
            (
                result.loss.item(),
                result.correct.item(),
                result.images,
                norms,
                trust,
                result.skipped.item(),
            )
        )
    engine.end_epoch()
    scores = evaluation(engine)
    return results, scores, engine.state_dict()


def poison(engine):
    """One gradient of this rank is not finite in step 1."""
    compute = engine._compute_gradients

    def poisoned(micro_batches, update):
        compute(micro_batches, update)
        if update.step == 1:
            engine.weights.gradients.flat[3] = float("nan")

    engine._compute_gradients = poisoned


def trains(processes, overrides, options=None):
    """A case: `train` with options."""
    options = dict(options or {})
    engine = engine_of(processes, overrides, options.pop("steps_per_epoch", None))
    found = train(engine, **options)
    engine._exchange.close()
    return found[:2], digest(engine.weights.state_dict()), found


def goes_on(processes, overrides, first, steps, saved=None, states=()):
    """A case: steps after what was saved.

    The outcome is what is saved then, of the model and of each replica.
    """
    engine = engine_of(processes, overrides, steps_per_epoch=2)
    if saved is not None:
        engine.load_state_dict(saved)
        engine.load_replica_states(len(states), lambda number: states[number])
    found = saved_after(engine, first, steps)
    engine._exchange.close()
    return (engine.cut, engine.notes), digest(engine.weights.state_dict()), found


def saved_after(engine, first, steps):
    """What is saved after some steps, of the model and of each replica."""
    for step in range(first, first + steps):
        engine.train_step(micro_batches(step, engine), one_step(step), 2.0, measure=True)
    return engine.state_dict(), [
        state for state in engine.replica_states() if engine.topology.is_main
    ]


@functools.lru_cache(maxsize=None)
def alone(*overrides, **options):
    """`train` in a single process; computed once for each recipe."""
    return trains(single(), overrides, options)[2]


def distance(actual, expected):
    """|actual - expected| over how far `expected` moved, all weights in one."""
    recipe = recipe_of(())
    initial = dict(build(recipe.model, recipe.run.seed).named_parameters())
    moved = [
        expected["weights"][name].double() - tensor.detach().double()
        for name, tensor in initial.items()
    ]
    apart = [
        actual["weights"][name].double() - expected["weights"][name].double() for name in initial
    ]
    norms = [
        torch.cat([tensor.flatten() for tensor in tensors]).norm() for tensors in (apart, moved)
    ]
    return (norms[0] / norms[1]).item()

"""A run that goes on when replicas are lost or come back: what each process remembers, and where all go on.

A step with all that belongs to it (update, log, evaluation, checkpoint) is a transaction: it is done, or, where a
replica is lost before that, thrown away and made again by those that are left. `exchange.order: tree` gives it the
same bits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from common.errors import ConfigError
from data.base import Source
from data.sources import open_source
from engines import factory
from engines.base import Engine
from engines.devices import synchronize
from parallel.elastic import Elastic
from parallel.processes import Processes
from parallel.topology import Topology
from recipe import loading
from recipe.config import Recipe
from training.loop import Progression
from training.stopping import StopSignals, launched

_ROOT = Path(__file__).resolve().parent.parent
_ROOMS = ("common", "data", "engines", "models", "optim", "parallel", "recipe", "training")  # of the code that computes
_KEPT = 2  # steps: those that a process has done differ by one at most, as an update needs all of them


class State(NamedTuple):
    """After a step: a copy of this process' part of the engine's state, on its device, and of the loop's."""

    engine: Dict[str, torch.Tensor]
    progression: Progression

    def on_cpu(self) -> State:
        return self._replace(engine={name: tensor.cpu() for name, tensor in self.engine.items()})


class Memory:
    """What this process remembers of the run from one generation to the next.

    states: after the last steps. sources: opened images. cut: blocks that open the stages after the first. micro: the
    images of a micro batch; None before the first generation has one.
    """

    def __init__(self, sources: List[Source]):
        self.states: Dict[int, State] = {}
        self.sources = sources
        self.cut: List[str] = []
        self.micro: Optional[int] = None
        self.was_main = False
        self.signal: Optional[int] = None

    def check(self, engine: Engine) -> None:
        """Raises Regroup unless the update just made was a whole one: a GPU makes it later than it is called for, and
        does not say whether the exchange before it was broken off."""
        synchronize(engine.device)
        engine.processes.check()

    def keep(self, engine: Engine, progression: Progression) -> None:
        """Remember a step that is done."""
        self.was_main, live, copies = engine.topology.is_main, engine.live_state(), None
        for step in sorted(self.states.keys() - {progression.step})[: 1 - _KEPT]:
            copies = self.states.pop(step).engine
        if copies is None:
            copies = {name: torch.empty_like(tensor) for name, tensor in live.items()}
        for name, copied in copies.items():  # in place: finding as much memory anew takes a CPU longer than this
            copied.copy_(live[name])
        self.states[progression.step] = State(copies, dataclasses.replace(progression))

    def restore(self, engine: Engine) -> Optional[Progression]:
        """Take the engine back to the last step that all have done; None if none remembers any. Every process calls.

        Processes that are new get the state from the first that computes the same stage.
        """
        processes, place = engine.processes, engine.topology
        known = processes.gather((self.was_main, sorted(self.states)))
        step = common(known)
        if step is None:
            return None
        state: Any = self.states.get(step)
        for stage in range(place.stages):
            ranks = range(stage, place.world, place.stages)
            have = [rank for rank in ranks if step in known[rank][1]]
            lack = [rank for rank in ranks if rank not in have]
            if lack and place.rank in (have[0], *lack):
                state = processes.pass_on(state and state.on_cpu(), have[0], lack)
        engine.load_live_state(state.engine)
        self.states = {step: state}
        return dataclasses.replace(state.progression)


def common(known: Sequence[Tuple[bool, List[int]]]) -> Optional[int]:
    """The step from which a generation goes on. Args: known: of each process, whether it was the main one of the
    generation before, and the steps of which it remembers the state, in order; none of a new one.

    The main process writes events and checkpoints of a step. If it is gone it may not have written those of the last
    one, but it has those of the step before: without it no update would have been made since.
    """
    old = [(was_main, steps) for was_main, steps in known if steps]
    if not old:
        return None
    if any(was_main for was_main, _ in old):
        return min(steps[-1] for _, steps in old)
    return max(steps[-min(2, len(steps))] for _, steps in old)


def identity(recipe: Recipe, sources: Sequence[Source]) -> Dict[str, str]:
    """What a replica that is taken in must have as the others have it: digests of recipe, code and images."""
    code = hashlib.sha256()
    for room in _ROOMS:
        for path in sorted((_ROOT / room).rglob("*.py")):
            code.update(path.read_bytes())
    images = [[len(source), list(source.classes), source.digest] for source in sources]
    return {"recipe": _digest(loading.dump(recipe)), "code": code.hexdigest(), "images": _digest(json.dumps(images))}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def run(recipe: Recipe, given: Topology, once: Callable[[Recipe, Processes, Memory], None]) -> None:
    """Call `once` in each generation until it returns. Args: given: by the launcher.

    Raises ConfigError: no launcher of ours has started this process, or this is no Linux; this replica was started
    later than the others, and has another recipe, code or images.
    """
    if not launched() or sys.platform != "linux":
        start = "needs Linux, and ./run_pod.sh, which starts a lost replica anew"
        raise ConfigError(f"parallel.elastic {start}; start by that, or use parallel.elastic=false")
    splits = ("train", "validation") if given.is_first else ()
    memory = Memory([open_source(recipe.data, recipe.model.classes, split) for split in splits])
    elastic = Elastic(given, recipe.parallel, identity(recipe, memory.sources))

    def note(number: int, frame: object) -> None:
        memory.signal = memory.signal or number

    with StopSignals(note):  # between two generations, too
        while True:
            try:
                elastic.begin()
                place = elastic.topology
                once(recipe, factory.connect(recipe, place, elastic), memory)
                elastic.close()
                return
            except Exception as error:
                if not elastic.explains(error):
                    elastic.close()  # its thread asks the store, and must not while Python shuts down
                    raise
            elastic.regroup(stopping=lambda: memory.signal is not None)

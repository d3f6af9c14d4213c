"""A run that goes on when replicas are lost or come back: what each process remembers, and how.

A step with all that belongs to it (update, log, evaluation, checkpoint) is a transaction: it is
done, or, where a replica is lost before that, thrown away and made again by those that are left.
`exchange.order: tree` gives it the same bits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import torch

from common.errors import ConfigError
from data.base import Source
from engines import factory
from engines.base import Engine
from engines.devices import synchronize
from parallel import launchers
from parallel.elastic import Elastic
from parallel.processes import Processes
from parallel.topology import Topology
from recipe import batch as arithmetic
from recipe import loading
from recipe.config import Recipe
from training.continuation import Continuation
from training.images import open_sources
from training.progression import Progression
from training.run_folder import RunFolder
from training.stopping import StopSignals

_ROOT = Path(__file__).resolve().parent.parent
# Rooms of the code that computes.
_ROOMS = ("common", "data", "engines", "models", "optim", "parallel", "recipe", "training")
_KEPT = 2  # steps: those that a process has done differ by one at most, as an update needs all
# In which a main process that was left out gives the run folder back: the lock of one whose host is
# gone stays on NFS until its lease ends, after 90 s by default.
_HANDED_OVER_SECONDS = 120.0


class State(NamedTuple):
    """After a step: a copy of this process's part of the engine's state, and of the loop's.

    engine: tensors by name, on its device.
    progression: of the loop.
    """

    engine: Dict[str, torch.Tensor]
    progression: Progression

    def on_cpu(self) -> State:
        """Return the same on the CPU, to be sent."""
        return self._replace(engine={name: tensor.cpu() for name, tensor in self.engine.items()})


class Known(NamedTuple):
    """The states that a process can go on from.

    was_main: whether it was the main one of the generation before.
    steps: of which it remembers the state, in order; none of a new process.
    """

    was_main: bool
    steps: List[int]


class Memory(Continuation):
    """The memory of this process of the run, from one generation to the next.

    states: after the last steps.
    sources: opened images.
    cut: blocks that open the stages after the first.
    micro: the images of a micro batch; None before the first generation has one.
    folder: the run folder, which the main process keeps open, and its mirror, which goes on sending.
    """

    def __init__(self, sources: List[Source]):
        """Begin with the images in `sources`, and nothing else."""
        self.states: Dict[int, State] = {}
        self.sources = sources
        self.cut: List[str] = []
        self.micro: Optional[int] = None
        self.folder: Optional[RunFolder] = None
        self.was_main = False

    def begin(self, number: int) -> None:
        """Begin the generation `number`; later ones than 0 have nothing new to say."""
        self.later = number > 0
        self.patience = _HANDED_OVER_SECONDS if self.later else 0.0
        self.has_trained = bool(self.states)

    def open_sources(self, recipe: Recipe, processes: Processes) -> List[Source]:
        """Return the images of the run's `recipe`, which stay open; `processes` are not asked."""
        return self.sources

    def open_folder(self, recipe: Recipe, processes: Processes) -> RunFolder:
        """Open the run folder of a `recipe`; in later generations it holds this very run.

        Other `processes` wait for it.
        """
        if self.folder is not None:
            self.folder.start(recipe)
            return self.folder
        if self.later:
            run = recipe.run.model_copy(update={"resume": "auto"})
            recipe = recipe.model_copy(update={"run": run})
        self.folder = super().open_folder(recipe, processes)
        return self.folder

    def close_folder(self, folder: RunFolder) -> None:
        """Keep the run `folder` open: the next generation does not wait until all is mirrored."""

    def close(self) -> None:
        """Close the run folder, once there is no next generation."""
        if self.folder is not None:
            self.folder.close()
            self.folder = None

    def with_micro_batch(self, recipe: Recipe, processes: Processes) -> Recipe:
        """Return the `recipe` with the micro batch that any of the `processes` remembers."""
        # In the place of `auto`: other replicas may have room for another micro batch, with which
        # they would learn otherwise.
        for micro in processes.gather(self.micro):
            if micro is not None:
                return arithmetic.settled(recipe, micro)
        return recipe

    def with_cut(self, recipe: Recipe, processes: Processes) -> Recipe:
        """Return the `recipe` with the cut that the main one of the `processes` remembers."""
        # Each process remembers the state of one stage.
        if not self.later:
            return recipe
        cut = processes.from_main(lambda: self.cut)
        split = cut or recipe.parallel.split
        parallel = recipe.parallel.model_copy(update={"split": split})
        return recipe.model_copy(update={"parallel": parallel})

    def begun(self, engine: Engine) -> None:
        """Remember cut and micro batch of an `engine` that is complete."""
        self.cut = list(engine.cut)
        self.micro = engine.batch.micro
        _elastic_of(engine).engine_is_built()

    def facts(self, engine: Engine) -> Dict[str, int]:
        """Return the generation that an `engine` belongs to."""
        return {"generation": _elastic_of(engine).number}

    def check(self, engine: Engine) -> None:
        """Raise Regroup unless the update that an `engine` just made was a whole one."""
        # A GPU makes an update later than it is called for, and does not say whether the exchange
        # before it was broken off.
        synchronize(engine.device)
        engine.processes.check()

    def keep(self, engine: Engine, progression: Progression) -> None:
        """Copy the state of an `engine`, and the `progression`, after a step."""
        self.was_main = engine.topology.is_main
        live = engine.live_state()
        copies = None
        others = sorted(self.states.keys() - {progression.step})
        for step in others[: 1 - _KEPT]:
            copies = self.states.pop(step).engine
        if copies is None:
            copies = {name: torch.empty_like(tensor) for name, tensor in live.items()}
        # In place: finding as much memory anew takes a CPU longer than this.
        for name, copied in copies.items():
            copied.copy_(live[name])
        self.states[progression.step] = State(copies, dataclasses.replace(progression))

    def restore(self, engine: Engine) -> Optional[Progression]:
        """Take the engine back to the last step that all have done; None if none remembers any.

        Every process calls. Processes that are new get the state from the first that computes the
        same stage.

        Args:
            engine: of this generation.
        """
        processes = engine.processes
        place = engine.topology
        known = processes.gather(Known(self.was_main, sorted(self.states)))
        step = common(known)
        if step is None:
            return None
        # A message for each stage: only processes that lack the state, and the one that sends it.
        state: Any = self.states.get(step)
        for stage in range(place.stages):
            ranks = range(stage, place.world, place.stages)
            have = [rank for rank in ranks if step in known[rank].steps]
            lack = [rank for rank in ranks if rank not in have]
            if lack and place.rank in (have[0], *lack):
                sent = state.on_cpu() if state is not None else None
                state = processes.pass_on(sent, have[0], lack)
        engine.load_live_state(state.engine)
        # A later state is of a step that not all have done: it is made again.
        self.states = {step: state}
        # A copy, which the loop changes: the remembered one must stay as it was.
        return dataclasses.replace(state.progression)


def _elastic_of(engine: Engine) -> Elastic:
    """Return the elastic part of an engine's processes, which every engine here has."""
    elastic = engine.processes.elastic
    assert elastic is not None
    return elastic


def common(known: Sequence[Known]) -> Optional[int]:
    """Return the step from which a generation goes on; None if nobody remembers any.

    The main process writes events and checkpoints of a step. If it is gone it may not have written
    those of the last one, but it has those of the step before: without it no update would have been
    made since.

    Args:
        known: of each process.
    """
    old = [process for process in known if process.steps]  # the others have just been started
    if not old:
        return None
    if any(process.was_main for process in old):
        return min(process.steps[-1] for process in old)
    return max(process.steps[-min(2, len(process.steps))] for process in old)


def identity(recipe: Recipe, sources: Sequence[Source]) -> Dict[str, str]:
    """Return digests of what a replica that is taken in must have as the others have it.

    This is stricter than a run that resumes (`_FREE` in training/run_folder.py): no key of the
    recipe may differ, and no line of the code, as a generation has only one of each.

    Args:
        recipe: of the run.
        sources: its images.

    Returns:
        Digests of recipe, code and images.
    """
    code = hashlib.sha256()
    for room in _ROOMS:
        for path in sorted((_ROOT / room).rglob("*.py")):
            code.update(path.read_bytes())
    # Digests also tell images apart that are as many, under the same names of classes.
    images = [[len(source), list(source.classes), source.digest] for source in sources]
    return {
        "recipe": _digest(loading.dump(recipe)),
        "code": code.hexdigest(),
        "images": _digest(json.dumps(images)),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def run(
    recipe: Recipe,
    given: Topology,
    once: Callable[[Recipe, Processes, Continuation], None],
) -> None:
    """Run each generation until one comes to the end.

    Args:
        recipe: of the run.
        given: the topology, by the launcher.
        once: trains in one generation.

    Raises:
        ConfigError: no launcher of ours has started this process, or this is no Linux; this replica
            was started later than the others, and has another recipe, code or images.
    """
    if not launchers.is_ours(os.environ) or sys.platform != "linux":
        raise ConfigError(
            "parallel.elastic needs Linux, and ./run_pod.sh, which starts a lost replica anew; "
            "start by that, or use parallel.elastic=false"
        )
    # Once for all generations: opening a large folder can take longer than one of them.
    memory = Memory(open_sources(recipe, given))
    elastic = Elastic(given, recipe.parallel, identity(recipe, memory.sources))

    def note(number: int, frame: object) -> None:
        """Remember the first signal, by its `number`; the loop listens in its own way."""
        memory.signal = memory.signal or number

    with StopSignals(note):  # between two generations, too
        while True:
            try:
                elastic.begin()
                memory.begin(elastic.number)
                once(recipe, factory.connect(recipe, elastic.topology, elastic), memory)
                memory.close()
                elastic.close()
                return
            except Exception as error:
                if not elastic.explains(error):
                    memory.close()
                    elastic.close()  # its thread asks the store, and must not while Python ends
                    raise
            # Without a next one an upload to the mirror that is under way is waited for.
            elastic.regroup(stopping=lambda: memory.signal is not None, before_end=memory.close)

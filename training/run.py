"""One run from recipe to end event: opens the data, the engine and the run folder, and trains."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path
from typing import Callable, Iterable, Iterator, List, NamedTuple, Optional

import torch

from common.errors import DONE, FAILED, STOPPED, ConfigError
from common.text import count
from data.batches import MicroBatch
from engines import factory
from engines.base import Engine
from engines.devices import device_of, name_of
from models import shapes
from optim import rounding
from parallel import launchers, topology
from parallel.generations import Regroup
from parallel.processes import Processes
from parallel.topology import Topology
from recipe import batch as arithmetic
from recipe.batch import Lengths
from recipe.config import Recipe
from recipe.division import Batch
from training import agreement, choices, images, loggers, opening, profiling, resuming
from training import services as _services  # noqa: F401  they register themselves
from training.checkpoint import CheckpointFolder
from training.continuation import Continuation
from training.images import Images
from training.loop import Stopped, Trainer, note_checkpoint
from training.metrics import Metrics, length_until
from training.monitor import Monitor
from training.profiling import MemoryHistory, Recordings
from training.progression import Progression
from training.run_folder import RunFolder
from training.stopping import late_signals

Say = Callable[[str], None]


class _Plan(NamedTuple):
    """A run before it has an engine.

    given: the recipe before its `auto` was settled.
    recipe: the recipe after that.
    batch: of `recipe`.
    """

    given: Recipe
    recipe: Recipe
    batch: Batch
    images: Images
    lengths: Lengths


class _Session(NamedTuple):
    """One start of a run, once all that belongs to it is opened.

    recipe: without `auto`.
    folder: None on other ranks than the main one.
    until_closed: contexts that end after the folder is closed.
    say: prints a line on the main rank.
    """

    recipe: Recipe
    images: Images
    lengths: Lengths
    engine: Engine
    folder: Optional[RunFolder]
    until_closed: contextlib.ExitStack
    continuation: Continuation
    history: MemoryHistory
    say: Say

    @property
    def path(self) -> Path:
        """The run folder."""
        return Path(arithmetic.output_folder(self.recipe))


def run(recipe: Recipe) -> None:
    """Train to the end, resuming what the run folder holds. All ranks call; the main one prints.

    Args:
        recipe: of the run.

    Raises:
        UserError: recipe, data or run folder cannot be used.
        MachineError: processes do not meet, or one does not give the run folder back.
        Stopped, TrainingError: see training.loop.
    """
    # Before anything is computed: sums round differently with another number of threads.
    if recipe.run.threads is not None:
        torch.set_num_threads(recipe.run.threads)
    # Before ranks meet: each finds the fault by itself, and none waits for the others.
    place = topology.from_environment(recipe)
    _check_division(recipe, place)
    # A single process has nobody to lose, so it runs as any other.
    if recipe.parallel.elastic and place.world > 1:
        from training import elastic

        elastic.run(recipe, place, _run)
    else:
        _run(recipe, factory.connect(recipe, place), Continuation())


def _run(recipe: Recipe, processes: Processes, continuation: Continuation) -> None:
    """Train by connected processes; in an elastic run, until these are no longer all of them."""
    agreement.check_one_recipe(recipe, processes)
    say = _printing(processes)
    # A later generation of an elastic run has nothing new to say about what has not changed.
    say_first = _silent if continuation.later else say
    plan = _plan(recipe, processes, continuation, say_first)
    opened = _run_folder(plan.recipe, processes, continuation)
    with contextlib.ExitStack() as until_closed, opened as folder:
        output = arithmetic.output_folder(plan.recipe)
        # Before the engine is built, which takes long: a finished run needs none.
        event = processes.from_main(lambda: folder.finished() if folder else None)
        if event:
            say_first(opening.finished(output, event))
            processes.part()
            return
        _describe(plan, processes, say_first)
        # An elastic run keeps its cut: each process remembers the state of one stage.
        plan = plan._replace(recipe=continuation.with_cut(plan.recipe, processes))
        with _memory_history(plan.recipe, processes, say_first) as history:
            engine = _engine(plan, processes, say_first)
            continuation.begun(engine)
            session = _Session(
                recipe=plan.recipe,
                images=plan.images,
                lengths=plan.lengths,
                engine=engine,
                folder=folder,
                until_closed=until_closed,
                continuation=continuation,
                history=history,
                say=say,
            )
            _train(session)
        say(opening.next_commands(output))


# Before the engine is built -------------------------------------------------------------------


def _check_minimum(recipe: Recipe, place: Topology) -> None:
    """Refuse an elastic run that is started with too few replicas. Raises ConfigError."""
    # Here, as only a start knows how many there are; plans and scores assume a number.
    parallel = recipe.parallel
    if parallel.elastic and parallel.minimum > place.replicas:
        started = count(place.replicas, "replica")
        raise ConfigError(
            f"parallel.minimum {parallel.minimum} is more than {started}; lower it, or start more"
        )


def _check_division(recipe: Recipe, place: Topology) -> None:
    """Check that the batch divides, before processes meet; one of several ranks says why not.

    Raises ConfigError.
    """
    try:
        arithmetic.divide(recipe, place.replicas)
        _check_minimum(recipe, place)
    except ConfigError as error:
        if place.world == 1:
            raise
        message = (
            f"{error}; {place.world} ranks were started, as many as --replicas of ./run_pod.sh says"
        )
        prints = launchers.prints(os.environ, place.rank)
        raise ConfigError(message if prints else "") from None


def _plan(
    recipe: Recipe,
    processes: Processes,
    continuation: Continuation,
    say: Say,
) -> _Plan:
    """Settle what the recipe leaves open by what there is: images, memory, links.

    In a later generation of an elastic run the micro batch is the run's in both recipes.
    """
    sources = continuation.open_sources(recipe, processes)
    opened = images.agreed(sources, processes)
    training_images = opened.training_images
    lengths = processes.together(lambda: arithmetic.lengths(recipe, training_images))
    for note in opened.notes:
        say(note)
    replicas = processes.topology.replicas
    # `auto` is settled by this division; the micro batch that it finds may make another.
    batch = arithmetic.divide(recipe, replicas)
    given = continuation.with_micro_batch(recipe, processes)
    settled = choices.settle(given, batch, processes, say)
    return _Plan(
        given=given,
        recipe=settled,
        batch=arithmetic.divide(settled, replicas),
        images=opened,
        lengths=lengths,
    )


def _describe(plan: _Plan, processes: Processes, say: Say) -> None:
    """Print what the run is."""
    described = opening.lines(
        plan.recipe,
        plan.images,
        batch=plan.batch,
        lengths=plan.lengths,
        device=_device_name(plan.recipe.run.device, processes.topology),
    )
    for line in described:
        say(line)


def _engine(plan: _Plan, processes: Processes, say: Say) -> Engine:
    """Return the engine of a plan, and print its notes."""
    is_weighted = plan.recipe.data.balance == "loss"
    weights = plan.images.class_weights if is_weighted else None
    engine = choices.create_engine(
        plan.recipe,
        plan.given,
        plan.batch,
        processes,
        steps_per_epoch=plan.lengths.steps_per_epoch,
        class_weights=weights,
        say=say,
    )
    for note in engine.notes:
        say(note)
    return engine


@contextlib.contextmanager
def _run_folder(
    recipe: Recipe,
    processes: Processes,
    continuation: Continuation,
) -> Iterator[Optional[RunFolder]]:
    """Open the run folder on the main rank, in a context at whose end it is closed."""
    # Before the folder is made: a missing package leaves nothing behind.
    processes.from_main(lambda: loggers.check(recipe.log))
    # Only the main rank has it; all end with its error.
    is_main = processes.topology.is_main
    folder = processes.together(
        lambda: continuation.open_folder(recipe, processes) if is_main else None
    )
    try:
        yield folder
    finally:
        if folder is not None:
            continuation.close_folder(folder)


def _device_name(wanted: str, place: Topology) -> str:
    """Return the name of a device, for the user."""
    return "IPUs" if wanted == "ipu" else name_of(device_of(wanted, place))


def _device_kind(wanted: str, place: Topology) -> str:
    """Return `cpu`, `cuda` or `ipu`."""
    return "ipu" if wanted == "ipu" else device_of(wanted, place).type


def _memory_history(recipe: Recipe, processes: Processes, say: Say) -> MemoryHistory:
    """Return the context that records this rank's memory, if the recipe asks for it."""
    place = processes.topology
    folder = Path(arithmetic.output_folder(recipe))
    file = profiling.snapshot_file(folder, place.rank)
    return MemoryHistory(recipe.log, file, _device_kind(recipe.run.device, place), say)


def _printing(processes: Processes) -> Say:
    """Return a function that prints a line, on the main rank only."""
    if not processes.topology.is_main:
        return _silent
    return functools.partial(print, flush=True)


def _silent(line: str) -> None:
    """Print nothing."""
    pass


# With an engine -------------------------------------------------------------------------------


def _train(session: _Session) -> None:
    """Restore what was learned, and train on."""
    checkpoints = CheckpointFolder(
        session.path / "checkpoints",
        session.recipe.checkpoint.keep_last,
        session.recipe.checkpoint.keep_best,
        mirror=session.folder.mirror if session.folder else None,
    )
    progression = _restore(session, checkpoints)
    # Checkpoints of this session name what it trains with, which may have changed at the user's word.
    resuming.take_images(progression, session.images, session.lengths.total)
    # Not before: until here the checkpoint may have been refused.
    if session.folder is not None and session.recipe.data.changed_images == "accept":
        session.folder.note_images(session.recipe)
    progression.rounding = rounding.VERSION
    engine = session.engine
    # From the step on that follows: the batches of a step are a function of seed and step.
    remaining = range(progression.step, session.lengths.total)
    monitor = _monitor(session, progression)
    micro_batches = engine.training_batches(session.images.train, remaining)
    evaluation = engine.evaluation_batches(
        session.images.validation,
        session.images.validation_images,
    )
    try:
        # The metrics end with what the checkpoint covers, and its own event comes after that.
        if progression.logged_checkpoint:
            note_checkpoint(monitor, progression)
        trainer = _trainer(
            session,
            progression,
            evaluation=evaluation,
            checkpoints=checkpoints,
            monitor=monitor,
        )
        # The loop listens to signals by itself. What is sent to the mirror after it may take minutes.
        session.until_closed.enter_context(late_signals())
        # Ranks take leave of each other, unless an error ends this one: others may be gone then.
        try:
            trainer.run(micro_batches)
        except Stopped:
            engine.close()
            raise
        engine.close()
    finally:
        # Also after an error: workers must not outlive the session, and loggers learn how it ended.
        micro_batches.close()
        evaluation.close()
        monitor.close(_exit_code(sys.exc_info()[1]))


def _trainer(
    session: _Session,
    progression: Progression,
    *,
    evaluation: Iterable[Optional[MicroBatch]],
    checkpoints: CheckpointFolder,
    monitor: Monitor,
) -> Trainer:
    """Return the loop of a session.

    Args:
        session: with its engine.
        progression: restored.
        evaluation: batches of the validation images.
        checkpoints: of the run.
        monitor: of the session.
    """
    return Trainer(
        recipe=session.recipe,
        lengths=session.lengths,
        engine=session.engine,
        evaluation_batches=evaluation,
        checkpoints=checkpoints,
        monitor=monitor,
        progression=progression,
        flops_per_image=_flops_by_epoch(session.recipe),
        classes=session.images.classes,
        trace_folder=session.path / "trace",
        recordings=_recordings(session, monitor),
        continuation=session.continuation,
    )


def _restore(session: _Session, checkpoints: CheckpointFolder) -> Progression:
    """Return how far the run is: by memory, by its newest checkpoint, or not at all."""
    engine = session.engine
    progression = session.continuation.restore(engine)
    remembered = progression is not None
    if progression is None:
        progression = resuming.resume(engine, checkpoints, session.recipe, session.images)
    _note_start(session, progression.step)
    if remembered:
        # Memory may be newer than any checkpoint: the events up to it are counted in the file.
        progression.logged_checkpoint = False
        progression.metrics_bytes = 0
        if session.folder is not None:
            progression.metrics_bytes = length_until(session.folder.metrics, progression.step)
        lines = [_generation(session, progression.step)]
    elif progression.step:
        lines = _resumed(session, progression)
    elif session.recipe.model.init_from:
        lines = resuming.start_from(engine, session.recipe, session.images)
    else:
        lines = []
    for line in lines:
        session.say(line)
    return progression


def _note_start(session: _Session, step: int) -> None:
    """Note in the run folder where this start goes on, and by how many ranks: reports list it."""
    if session.folder is None:
        return
    place = session.engine.topology
    session.folder.note(
        step=step,
        replicas=place.replicas,
        stages=place.stages,
        **session.continuation.facts(session.engine),
    )


def _generation(session: _Session, step: int) -> str:
    """Return the line about a step from which the replicas of an elastic run go on."""
    elastic = session.engine.processes.elastic
    assert elastic is not None
    replicas = ", ".join(map(str, elastic.replicas))
    where = f"step {step} of {session.lengths.total}"
    return f"generation {elastic.number}: going on at {where} with replicas {replicas}"


def _resumed(session: _Session, progression: Progression) -> List[str]:
    """Return lines about a checkpoint from which a run goes on, and what has changed since."""
    recipe = session.recipe
    changes = resuming.changes(
        progression,
        session.images,
        recipe.precision,
        device=_device_kind(recipe.run.device, session.engine.topology),
        threads_before=session.folder.first_threads() if session.folder else None,
    )
    return [f"resuming at step {progression.step} of {session.lengths.total}", *changes]


def _monitor(session: _Session, progression: Progression) -> Monitor:
    """Open where events go. Events behind the checkpoint are cut off."""
    folder = session.folder
    if folder is None:
        return Monitor(None, (), session.say)
    # Before the file is cut back: it still tells which events services have been sent.
    services_of_run = loggers.start(session.recipe, progression.step, session.say)
    metrics = Metrics(folder.metrics, keep_bytes=progression.metrics_bytes)
    return Monitor(metrics, services_of_run, session.say)


def _recordings(session: _Session, monitor: Monitor) -> Recordings:
    """Return the recordings of torch's profilers."""
    file = profiling.profile_file(session.path, session.engine.topology.rank)
    return Recordings(
        session.recipe.log.profile,
        file,
        session.engine,
        monitor=monitor,
        history=session.history,
    )


def _flops_by_epoch(recipe: Recipe) -> Callable[[int], float]:
    """Return the floating-point operations of an image of an epoch, as a function."""

    # The loop asks at each update, about a handful of sizes.
    @functools.lru_cache(maxsize=None)
    def of_size(size: int) -> float:
        return shapes.training_flops(recipe.model, size)

    return lambda epoch: of_size(arithmetic.training_image_size(recipe, epoch))


def _exit_code(error: Optional[BaseException]) -> int:
    """Return the exit code that loggers report for an error, or for none."""
    if error is None:
        return DONE
    # The next generation of an elastic run goes on with the same record.
    return STOPPED if isinstance(error, (Stopped, Regroup)) else FAILED

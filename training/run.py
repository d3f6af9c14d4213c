"""One run from recipe to end event: opens the data, the engine and the run folder, resumes, trains."""

from __future__ import annotations

import functools
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch

from common.errors import DONE, FAILED, STOPPED, CheckpointError, ConfigError, DataError
from common.text import count, listed
from data.base import ClassNames, Source
from data.sources import class_names, open_source
from engines import factory
from engines.base import Engine
from engines.devices import device_of, name_of
from models import shapes
from optim import rounding
from parallel import launchers, topology
from parallel.processes import Processes
from parallel.topology import Topology
from recipe import batch as arithmetic
from recipe import loading
from recipe.batch import Lengths
from recipe.config import Recipe
from training import choices, classes, loggers, services, weights  # noqa: F401  services register themselves
from training.checkpoint import CheckpointFolder
from training.loop import Progression, Stopped, Trainer, note_checkpoint
from training.metrics import NAME, Metrics, last_events, length_until
from training.monitor import Monitor, duration
from training.profiling import MemoryHistory, Recordings
from training.run_folder import RunFolder, first_difference

if TYPE_CHECKING:
    from training.elastic import Memory

_HANDED_OVER_SECONDS = 10.0
_ELSEWHERE = "choose another folder by run.output=FOLDER"
_Say = Callable[[str], None]


class _Images(NamedTuple):
    """Sources, None on ranks where no images enter, and their sizes. digest: of both sources, joined by a hyphen."""

    train: Optional[Source]
    validation: Optional[Source]
    training_images: int
    validation_images: int
    classes: Sequence[str]
    digest: str


def run(recipe: Recipe) -> None:
    """Train `recipe` to its end, resuming what its run folder holds. All ranks call this; only the main one prints.
    Raises UserError: recipe, data or run folder cannot be used; Stopped, TrainingError: see training.loop."""
    if recipe.run.threads is not None:
        torch.set_num_threads(recipe.run.threads)
    place = topology.from_environment(recipe)
    _check_division(recipe, place)
    if recipe.parallel.elastic and place.world > 1:
        from training import elastic

        elastic.run(recipe, place, _run)
    else:
        _run(recipe, factory.connect(recipe, place))


def _check_division(recipe: Recipe, place: Topology) -> None:
    """Raises ConfigError for what does not divide, before the processes meet; one of several ranks says so."""
    try:
        arithmetic.divide(recipe, place.replicas)
    except ConfigError as error:
        if place.world == 1:
            raise
        started = f"{error}; {place.world} ranks were started, as many as --replicas of ./run_pod.sh says"
        raise ConfigError(started if launchers.prints(os.environ, place.rank) else "") from None


def _run(recipe: Recipe, processes: Processes, memory: Optional[Memory] = None) -> None:
    """As `run`, in one generation of processes of an elastic run, or in the only one."""
    place, later = processes.topology, processes.elastic is not None and processes.elastic.number > 0
    batch = arithmetic.divide(recipe, place.replicas)
    _check_one_recipe(recipe, processes)
    images = _open_images(recipe, processes, memory)
    lengths = processes.together(lambda: arithmetic.lengths(recipe, images.training_images))
    say: _Say = functools.partial(print, flush=True) if place.is_main else lambda line: None
    aloud, say = say, (lambda line: None) if later else say  # a later generation has the same to say
    for source in filter(None, (images.train, images.validation)):
        for note in source.notes:
            say(note)
    if memory is not None:
        recipe = _with_micro_batch(recipe, processes, memory)
    given, recipe = recipe, choices.resolve(recipe, batch, processes, say)
    batch = arithmetic.divide(recipe, place.replicas)
    output, model = arithmetic.output_folder(recipe), recipe.model
    processes.from_main(lambda: loggers.check(recipe.log))
    folder = processes.together(lambda: _opened_folder(recipe, later) if place.is_main else None)
    try:
        event = processes.from_main(lambda: folder.finished())
        if event:
            result = f"top1 {event['top1']:.2%} in {duration(event['seconds'])}"
            say(f"{output}: this run is finished: {result}; train again with run.output=FOLDER")
            processes.part()
            return
        device = "IPUs" if recipe.run.device == "ipu" else name_of(device_of(recipe.run.device, place))
        say(f"run {recipe.run.name} in {output}, on {device}")
        parameters = sum(shape.parameters for shape in shapes.blocks(model, model.image_size).values())
        say(f"{model.describe()}: {parameters:,} parameters, {model.image_size} px")
        sizes = f"{images.training_images:,} training and {images.validation_images:,} validation images"
        say(f"{sizes} of {count(model.classes, 'class', 'classes')} ({recipe.data.source})")
        say(batch.describe())
        say(lengths.describe())
        if later:
            recipe = _with_cut(recipe, processes, memory)
        kind = "ipu" if recipe.run.device == "ipu" else device_of(recipe.run.device, place).type
        with MemoryHistory(recipe, place, kind, say) as history:
            engine = choices.create_engine(recipe, given, batch, processes, lengths.steps_per_epoch, say)
            for note in engine.notes:
                say(note)
            if memory is not None:
                memory.cut, memory.micro = list(engine.cut), batch.micro
                processes.elastic.settled()
            say = aloud
            _train(recipe, lengths, engine, images, folder, say, memory, history)
        pasted = shlex.quote(output)
        scoring = f"python evaluate.py --checkpoint {pasted} --best"
        say(f"next: {scoring} | python -m tools.report {pasted} | python -m tools.export {pasted}")
    finally:
        if folder is not None:
            folder.close()


def _opened_folder(recipe: Recipe, later: bool) -> RunFolder:
    """Args: later: another process may have to end first, which had it in the generation before."""
    end = time.monotonic() + (_HANDED_OVER_SECONDS if later else 0.0)
    while True:
        try:
            return RunFolder(recipe)
        except ConfigError:
            if time.monotonic() > end:
                raise
        time.sleep(0.05)


def _with_micro_batch(recipe: Recipe, processes: Processes, memory: Memory) -> Recipe:
    """The recipe with the micro batch that the run has had until now, in the place of `auto`: other replicas may have
    room for another, with which they would learn otherwise."""
    known = next(filter(None, processes.gather(memory.micro)), None)
    return recipe if known is None else arithmetic.settled(recipe, known)


def _with_cut(recipe: Recipe, processes: Processes, memory: Memory) -> Recipe:
    """The recipe with the cut into stages that the run has had until now: each process remembers the state of one."""
    cut = processes.from_main(lambda: memory.cut)
    parallel = recipe.parallel.model_copy(update={"split": cut or recipe.parallel.split})
    return recipe.model_copy(update={"parallel": parallel})


def _check_one_recipe(recipe: Recipe, processes: Processes) -> None:
    """Raises ConfigError where ranks were started with different recipes; only hosts' own files can be the cause."""
    texts = processes.gather(loading.dump(recipe))
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
    if other is None:
        return
    first, second = (loading.loads(texts[rank], f"rank {rank}") for rank in (0, other))
    difference = first_difference(first, second) or first_difference(first, second, free={})
    fault = f"rank {other} has another recipe than rank 0: {difference.replace(' there', ' on rank 0')}"
    # All ranks find it, one prints it.
    raise ConfigError(f"{fault}; give all hosts the same files and overrides" if processes.topology.is_main else "")


def _open_images(recipe: Recipe, processes: Processes, memory: Optional[Memory]) -> _Images:
    """Args: memory: of an elastic run, with those that are open already.
    Raises DataError where a source cannot be opened, or is not the same on all ranks where images enter."""
    splits = ("train", "validation") if processes.topology.is_first else ()

    def opened() -> List[Source]:
        return [open_source(recipe.data, recipe.model.classes, each) for each in splits]

    sources = processes.together(opened) if memory is None else memory.sources
    digest = "-".join(source.digest for source in sources)
    facts = [*(len(source) for source in sources), list(sources[0].classes), digest] if sources else None
    everywhere = processes.gather(facts)
    first = everywhere[0]
    for rank, found in enumerate(everywhere):
        if found is not None and found != first:
            text = (
                f"rank {rank} finds {found[0]} training and {found[1]} validation images of {len(found[2])} classes, "
                f"rank 0 {first[0]} and {first[1]} of {len(first[2])} (or others of the same number); give all hosts "
                "the same data.root"
            )
            raise DataError(text if processes.topology.is_main else "")
    return _Images(*(sources or (None, None)), *first)


def _train(
    recipe: Recipe,
    lengths: Lengths,
    engine: Engine,
    images: _Images,
    folder: Optional[RunFolder],
    say: _Say,
    memory: Optional[Memory],
    history: MemoryHistory,
) -> None:
    """Args: folder: on the main rank. memory: of an elastic run. history: of the device's memory."""
    path = Path(arithmetic.output_folder(recipe))
    checkpoints = CheckpointFolder(path / "checkpoints", recipe.checkpoint.keep_last, recipe.checkpoint.keep_best)
    progression = None if memory is None else memory.restore(engine)
    remembered = progression is not None
    if not remembered:
        progression = _resume(engine, checkpoints, recipe, images)
    step = progression.step
    if folder is not None:
        facts = {} if memory is None else {"generation": engine.processes.elastic.number}  # a report lists them
        folder.note(step=step, replicas=engine.topology.replicas, stages=engine.topology.stages, **facts)
    if remembered:
        elastic = engine.processes.elastic
        names = ", ".join(map(str, elastic.replicas))
        say(f"generation {elastic.number}: going on at step {step} of {lengths.total} with replicas {names}")
        progression.metrics_bytes = length_until(folder.metrics, step) if folder is not None else 0
        progression.logged_checkpoint = False
    elif step:
        say(f"resuming at step {step} of {lengths.total}")
        if progression.images_digest not in ("", images.digest):
            say("going on with other images than before (data.changed_images=accept)")
        precision, on_ipu = recipe.precision, recipe.run.device == "ipu"  # which has a generator of its own
        rounds = (precision.weights, precision.rounding) == ("float16", "stochastic") and not on_ipu
        if progression.rounding != rounding.VERSION and rounds:
            versions = f"version {rounding.VERSION}, not {progression.rounding}"
            say(f"weights are rounded by other random bits from here on: {versions}")
        before, now = folder and folder.first_threads(), torch.get_num_threads()
        if engine.device.type == "cpu" and before not in (None, now):
            say(
                f"{count(now, 'thread')} here, {before} when the run began: sums may round differently in their last "
                f"bits; run.threads={before} computes as before"
            )
    elif recipe.model.init_from:
        _start_from(engine, recipe, images, say)
    progression.images_digest, progression.rounding = images.digest, rounding.VERSION
    micro_batches = engine.training_batches(images.train, range(step, lengths.total))
    evaluation = engine.evaluation_batches(images.validation, images.validation_images)
    metrics, own = None, ()
    if folder is not None:
        own = loggers.start(recipe, step, say)  # before events behind the checkpoint are cut off
        metrics = Metrics(folder.metrics, keep_bytes=progression.metrics_bytes)
    monitor = Monitor(metrics, own, say)
    flops = functools.lru_cache(maxsize=None)(functools.partial(flops_per_image, recipe))
    try:
        if progression.logged_checkpoint:
            note_checkpoint(monitor, progression)
        trainer = Trainer(
            *(recipe, lengths, engine, evaluation, checkpoints, monitor, progression),
            flops_per_image=lambda epoch: flops(arithmetic.training_image_size(recipe, epoch)),
            classes=images.classes,
            trace_folder=path / "trace",
            recordings=Recordings(recipe, engine, monitor, history),
            memory=memory,
        )
        try:
            trainer.run(micro_batches)
        except Stopped:
            engine.close()
            raise
        engine.close()
    finally:
        micro_batches.close()
        evaluation.close()
        error = sys.exc_info()[1]
        monitor.close(DONE if error is None else STOPPED if isinstance(error, Stopped) else FAILED)


def flops_per_image(recipe: Recipe, image_size: int) -> float:
    """Floating-point operations of training on one image: forward once, backward twice, two to a multiply-add."""
    return 3 * 2 * sum(shape.multiply_adds for shape in shapes.blocks(recipe.model, image_size).values())


def _start_from(engine: Engine, recipe: Recipe, images: _Images, say: _Say) -> None:
    """Load the weights that the recipe names; the main rank finds out whose classes they know."""
    processes, model = engine.processes, recipe.model
    stored = processes.from_main(lambda: weights.read(model.init_from, model.init_weights))
    found = processes.together(lambda: weights.fitted(stored, engine.shapes, model, new_classifier=True))
    data = processes.from_main(lambda: _trained_classes(recipe, images))
    fitted = processes.together(lambda: classes.for_data(stored, classes.Fitted(*found, note=""), recipe, data))
    engine.load_weights(fitted.tensors)
    for note in filter(None, (*stored.notes, fitted.note)):
        say(note)
    say(f"starting from {stored.path}" + (f"; new: {', '.join(fitted.fresh)}" if fitted.fresh else ""))


def _trained_classes(recipe: Recipe, images: _Images) -> ClassNames:
    own = ClassNames(images.train.place, tuple(images.classes), sorted=False)
    return class_names(recipe.data, "train") or own


def _resume(engine: Engine, checkpoints: CheckpointFolder, recipe: Recipe, images: _Images) -> Progression:
    """Load the newest whole checkpoint. The main rank reads it for all: hosts need not share a file system."""
    content, replicas = engine.processes.from_main(lambda: _newest(checkpoints, recipe, images))
    if content is None:
        return Progression()
    step = content["progression"]["step"]

    def load(kind: str, take_over: Callable[[], None]) -> None:
        try:
            take_over()
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{checkpoints.path(step)}: of {kind}: {error}; {_ELSEWHERE}") from None

    together, read = engine.processes.together, functools.partial(checkpoints.replica_state, step)
    together(lambda: load("another model", lambda: engine.load_state_dict(content["engine"])))
    # Apart, since here ranks wait for each other: none may be missing because the model did not fit there.
    together(lambda: load("other replicas", lambda: engine.load_replica_states(replicas, read)))
    return Progression(**content["progression"])


def _newest(checkpoints: CheckpointFolder, recipe: Recipe, images: _Images) -> Tuple[Optional[dict], int]:
    """Return the content of the newest whole checkpoint and its number of replica files.
    Raises CheckpointError where it is of another recipe, of images with another digest that are not accepted, or of
    other classes."""
    content = checkpoints.load_newest(warn=functools.partial(print, flush=True), with_replicas=True)
    if content is None:
        lost = last_events(checkpoints.folder.parent / NAME).get("checkpoint")
        if lost and checkpoints.folder.is_dir():
            raise CheckpointError(
                f"{checkpoints.folder}: the checkpoint of step {lost['step']}, which metrics.jsonl tells of, is gone; "
                "restore all files of its number, or delete that folder to start from the beginning"
            )
        return None, 0
    step = content["progression"]["step"]
    path = checkpoints.path(step)
    difference = first_difference(loading.loads(content["recipe"], str(path)), recipe)
    if difference:
        raise CheckpointError(f"{path}: of another run: {difference}; {_ELSEWHERE}")
    before = content["progression"].get("images_digest")
    if before and before != images.digest and recipe.data.changed_images == "error":
        splits = zip(("training", "validation"), before.split("-"), images.digest.split("-"))
        which = " and ".join(split for split, old, new in splits if old != new)
        raise CheckpointError(
            f"{path}: saved with other {which} images than {recipe.data.place} has now (other names, labels or shards)"
            "; bring those back, or go on with these by data.changed_images=accept"
        )
    _check_classes(content.get("classes") or images.classes, images, f"{path}: saved with", checkpoints.folder.parent)
    return content, checkpoints.replica_count(step)


def _check_classes(before: Sequence[str], images: _Images, saved: str, folder: Path) -> None:
    """Raises CheckpointError where the classes are not those that a run had, in their order, as labels count them."""
    if list(before) == list(images.classes):
        return
    changed = [f"{old} is {new} now" for old, new in zip(before, images.classes) if old != new]
    remedy = f"bring those back, or start another run from these weights by model.init_from={folder} run.output=FOLDER"
    raise CheckpointError(f"{saved} other classes, or in another order ({listed(changed)}); {remedy}")

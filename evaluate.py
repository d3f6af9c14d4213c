"""Scores trained weights, or classifies images:

    python evaluate.py --checkpoint runs/quickstart [section.key=value ...]
    python evaluate.py --checkpoint runs/quickstart --images FILE ...

PATH is a run folder (its newest checkpoint), a checkpoint, weights (.safetensors, a timm or torch
file), or a program that tools.export wrote (.onnx, .pt2). Weights that do not carry their recipe
need --config. Exit codes are train.py's: 0 done, 1 failed, 2 wrong input.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import re
from pathlib import Path
from typing import Any, List, NamedTuple, Sequence, Tuple

from common.command import Parser, add_choice_of_weights, one_line
from common.errors import DONE, DataError
from common.files import writing
from common.json_io import json_text
from common.text import count, printable

_WORST = 10  # classes that the terminal shows; the file has all


class _Model(NamedTuple):
    """A trained model.

    stored: `StoredWeights` or an `ExportedModel`.
    recipe: `recipe.config.Recipe`, with the overrides of the command.
    engine: that predicts with it; an exported program is its own.
    """

    stored: Any
    recipe: Any
    engine: Any


class _Evaluation(NamedTuple):
    """Scores of a model on the validation images.

    stored: see `_Model`.
    report: `training.scoring.Scores`.
    title: the scores in words.
    rows: by class, the worst first.
    classes: names by label.
    notes: lines of the source, about images that were left out.
    """

    stored: Any
    report: Any
    title: str
    rows: List[dict]
    classes: Tuple[str, ...]
    notes: Tuple[str, ...]


@one_line()
def main(arguments=None) -> int:
    """Run the command.

    Args:
        arguments: words of the command line; None: those of this process.

    Returns:
        The exit code.
    """
    options = _parser().parse_intermixed_args(arguments)
    # argparse also takes the overrides behind --images for images.
    images = []
    for text in options.images:
        if re.match(r"\w+\.\w+=", text) and not Path(text).exists():
            options.overrides.append(text)
        else:
            images.append(text)
    return _classify(options, images) if images else _score(options)


def _parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="evaluate.py",
        description="Score trained weights on validation images, or classify images.",
    )
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="PATH",
        help="run folder, checkpoint, weights, .onnx, .pt2",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="recipe; default: the one that the run was trained by",
    )
    add_choice_of_weights(parser)
    # Takes any number of words, so also overrides that follow it: see main.
    parser.add_argument(
        "--images",
        nargs="+",
        default=[],
        metavar="FILE",
        help="classify these instead of scoring",
    )
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        help="for tables and picture (default: in the run)",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="replaces a key of the recipe",
    )
    return parser


def _opened(options) -> _Model:
    """Return the model in the file that the command names."""
    # Late: a wrong command line is refused before torch is loaded.
    from training import exported, scoring, weights

    # With --best a folder is meant, even one that is called like a program.
    suffix = Path(options.checkpoint).suffix
    if suffix in (exported.ONNX, exported.PROGRAM) and not options.best:
        model = exported.read(options.checkpoint, options.weights)
        recipe = weights.recipe_of(model, options.config, options.overrides)
        model.check(recipe.model)
        return _Model(model, recipe, model)
    stored, recipe = weights.opened(
        options.checkpoint,
        options.weights,
        options.best,
        config=options.config,
        overrides=options.overrides,
    )
    for note in stored.notes:
        print(note)
    return _Model(stored, recipe, scoring.engine_with(stored, recipe))


def _score(options) -> int:
    """Score the validation images: write tables and picture, print a summary."""
    from training import weights

    evaluation = _evaluation(_opened(options))
    path = evaluation.stored.path
    run_folder = weights.run_folder_of(path)
    is_exported = run_folder is not None and path.parent.name == "export"
    name = f"evaluation-{path.name}" if is_exported else "evaluation"
    folder = Path(options.output or (run_folder or Path()) / name)
    _write(folder, evaluation)
    _print(evaluation)
    shown = printable(str(folder))
    print(f"all classes, confusion and scores: {shown}/classes.csv, confusion.png, scores.json")
    return DONE


def _evaluation(model: _Model) -> _Evaluation:
    """Score the validation images of the model's recipe; the engine is closed."""
    from data.loader import EvaluationBatches
    from training import progress, scoring

    source = _labelled_source(model)
    label_count = model.recipe.model.classes
    batches = EvaluationBatches(
        source,
        data=model.recipe.data,
        image_size=model.recipe.model.image_size,
        batch=model.recipe.batch.evaluation,
        device=model.engine.device,
    )
    try:
        counted = progress.counted(batches, len(batches), "batches are scored")
        report = scoring.score(model.engine, counted, label_count)
    finally:
        batches.close()
        model.engine.close()
    return _Evaluation(
        stored=model.stored,
        report=report,
        title=scoring.accuracy(report.top1, report.top5, label_count),
        rows=scoring.class_rows(report, source.classes),
        classes=source.classes,
        notes=source.notes,
    )


def _labelled_source(model: _Model) -> Any:
    """Open the validation images, with the model's labels; print what the user should know of them.

    The order of the classes in the data does not matter.
    """
    from data.sources import open_source
    from training import classes

    data = model.recipe.data
    label_count = model.recipe.model.classes
    known = classes.of_model(model.stored, data, label_count)
    source = open_source(data, label_count, "validation", known.names)
    for note in (known.note, *source.notes):
        if note:
            print(note)
    return source


def _write(folder: Path, evaluation: _Evaluation) -> None:
    """Write the table of classes, the picture, and the scores."""
    from training import scoring

    report = evaluation.report
    summary = {
        "weights": evaluation.stored.which,
        "file": str(evaluation.stored.path),
        **report._asdict(),
        "notes": evaluation.notes,
    }
    del summary["confusion"]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        scoring.write_class_table(folder / "classes.csv", evaluation.rows)
        picture = folder / "confusion.png"
        scoring.draw_confusion(picture, report, evaluation.classes, evaluation.title)
        (folder / "scores.json").write_text(json_text(summary, indent=1) + "\n")


def _print(evaluation: _Evaluation) -> None:
    """Print the scores, and the worst classes."""
    report = evaluation.report
    stored = evaluation.stored
    images = count(report.images, "image")
    if report.unreadable:
        images += f"; {report.unreadable} unreadable left out"
    about = f"{printable(str(stored.path))}, {stored.which} weights"
    print(f"{about}: {evaluation.title}  loss {report.loss:.4f}  ({images})")
    missed = [row for row in evaluation.rows if row["top1"] is not None and row["top1"] < 1]
    worst = missed[:_WORST]
    if not worst:
        print("every class: 100 %")
        return
    width = max(len("class"), max(len(row["class"]) for row in worst))
    print(f"{'class':{width}}  images    top1  most often taken for")
    for row in worst:
        taken_for = f"{row['taken_for']} ({count(row['times'], 'time')})"
        print(f"{row['class']:{width}}  {row['images']:6}  {row['top1']:6.1%}  {taken_for}")


def _classify(options, files: Sequence[str]) -> int:
    """Print the likeliest classes of each image."""
    from training import classes

    model = _opened(options)
    label_count = model.recipe.model.classes
    try:
        known = classes.of_model(model.stored, model.recipe.data, label_count)
    except DataError:  # neither the file nor the data names them
        known = classes.Known(tuple(f"class {label}" for label in range(label_count)))
    if known.note:
        print(known.note)
    for file in files:
        guesses = _guesses(model, file, known.names)
        print(f"{printable(file)}: {', '.join(guesses)}")
    model.engine.close()
    return DONE


def _guesses(model: _Model, file: str, names: Sequence[str]) -> List[str]:
    """Return the likeliest classes of an image with their probabilities, as text."""
    from training.metrics import TOP

    batch = _batch_of_one(model, file)
    probabilities = model.engine.predict_step(batch).softmax(1)[0]
    best = probabilities.topk(min(TOP, len(names)))
    guesses = zip(best.values.tolist(), best.indices.tolist())
    return [f"{names[label]} {share:.1%}" for share, label in guesses]


def _batch_of_one(model: _Model, file: str) -> Any:
    """Return the micro batch of an image in a file, whose label is not known."""
    import torch

    from data import damage
    from data.base import UnreadableImage
    from data.batches import MicroBatch
    from data.encoded import EncodedImage, read_image
    from data.transforms import Evaluation

    try:
        encoded = read_image(file)
    except UnreadableImage as error:
        raise DataError(f"{error}; name an image file") from None
    image = EncodedImage(encoded, printable(file))
    transform = Evaluation(model.recipe.data.crop_fraction)
    pixels = transform(image, model.recipe.model.image_size, epoch=0, index=0)
    damage.report([image.damage] if image.damage else [])
    unknown = torch.zeros(1, dtype=torch.int64)
    return MicroBatch(
        images=pixels[None].contiguous(),
        labels=unknown,
        indices=unknown,
        valid=1,
        number=0,
        step=0,
        unreadable=(),
    )

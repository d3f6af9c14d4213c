"""Scores trained weights, or classifies images:

    python evaluate.py --checkpoint runs/quickstart [section.key=value ...]
    python evaluate.py --checkpoint runs/quickstart --images PATH ... [--table FILE.csv]

A checkpoint is a run folder (its newest checkpoint), a checkpoint, weights (.safetensors, a timm or torch
file), a program that tools.export wrote (.onnx, .pt2), or timm:NAME, weights that timm downloads and
whose images are prepared as timm does. Other weights that do not carry their recipe need --config.
Exit codes are train.py's: 0 done, 1 failed, 2 wrong input.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import re
from pathlib import Path
from typing import Any, Callable, Iterator, List, NamedTuple, Sequence, Tuple

from common.command import Parser, add_choice_of_weights, one_line
from common.errors import DONE, DataError, first_line
from common.files import check_file, checking, replacing, write_text, writing
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
    parser = _parser()
    options = parser.parse_intermixed_args(arguments)
    # argparse also takes the overrides behind --images for images.
    images = []
    for text in options.images:
        if re.match(r"\w+\.\w+=", text) and not Path(text).exists():
            options.overrides.append(text)
        else:
            images.append(text)
    if options.table and not images:
        parser.error("--table goes with --images: the table has a row for each of them")
    if options.output and images:
        parser.error("--output goes with scores; the classes of --images go into --table FILE.csv")
    if options.table:
        check_file(Path(options.table), "--table")
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
        help="run folder, checkpoint, weights, timm:NAME, .onnx, .pt2",
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
        metavar="PATH",
        help="classify these images, or all in these folders, instead of scoring",
    )
    parser.add_argument(
        "--table",
        metavar="FILE.csv",
        help="for the classes of --images (default: the terminal)",
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
    """Score the validation images: write tables, print a summary, and draw a picture."""
    from training import weights

    model = _opened(options)
    path = model.stored.path
    run_folder = weights.run_folder_of(path)
    is_exported = run_folder is not None and path.parent.name == "export"
    name = f"evaluation-{path.name}" if is_exported else "evaluation"
    folder = Path(options.output or (run_folder or Path()) / name)
    evaluation = _evaluation(model, folder)
    _print(evaluation)
    _write(folder, evaluation)
    shown = printable(str(folder))
    # Last: what has taken hours to compute does not depend on a picture.
    fault = _draw(folder / "confusion.png", evaluation)
    if fault:
        print(f"no picture of the confusion: {fault}")
        print(f"all classes and scores: {shown}/classes.csv, scores.json")
    else:
        print(f"all classes, confusion and scores: {shown}/classes.csv, confusion.png, scores.json")
    return DONE


def _evaluation(model: _Model, folder: Path) -> _Evaluation:
    """Score the validation images of the model's recipe; the engine is closed.

    Args:
        model: to be scored.
        folder: that will get the tables. Nothing is scored if it cannot be written.
    """
    from common import progress
    from data.loader import EvaluationBatches
    from training import scoring

    source = _labelled_source(model)
    # What takes hours to compute must not fail for a folder that could never be written.
    _try(folder)
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
        # Also after an error: workers must not outlive the command.
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
    from training import classes, weights

    data = model.recipe.data
    label_count = model.recipe.model.classes
    known = classes.of_model(model.stored, data, label_count)
    source = open_source(data, label_count, "validation", known.names)
    seen = ""
    if weights.trained_on(model.stored, data):
        seen = "the model was trained on images that are scored: scores say nothing about others"
    for note in (known.note, seen, *source.notes):
        if note:
            print(note)
    return source


def _try(folder: Path) -> None:
    """Make a folder, and write a file in it that is removed at once.

    Raises:
        ConfigError: it cannot be written.
        OSError: the disk is full, which blames no input.
    """
    with checking(folder, "name another folder by --output"):
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / ".trial"
        trial.touch()
        trial.unlink()


def _write(folder: Path, evaluation: _Evaluation) -> None:
    """Write the table of classes and the scores."""
    from training import class_scores, scoring

    report = evaluation.report
    summary = {
        "weights": evaluation.stored.which,
        "file": str(evaluation.stored.path),
        **report._asdict(),
        **class_scores.macro(report.confusion)._asdict(),
        "classes": evaluation.rows,
        "notes": evaluation.notes,
    }
    # A tensor, which is no JSON; the picture shows it.
    del summary["confusion"]
    with writing(folder):
        scoring.write_class_table(folder / "classes.csv", evaluation.rows)
        write_text(folder / "scores.json", json_text(summary, indent=1) + "\n")


def _draw(path: Path, evaluation: _Evaluation) -> str:
    """Draw the picture of the confusion; return why there is none, or nothing."""
    from training import scoring

    with writing(path.parent):
        path.unlink(missing_ok=True)  # that of another evaluation would stand beside these scores
        classes = len(evaluation.classes)
        if classes > scoring.MOST_DRAWN:
            return f"{classes:,} classes are more than can be seen in one"
        try:
            with replacing(path) as picture:
                scoring.draw_confusion(
                    picture, evaluation.report, evaluation.classes, evaluation.title
                )
        except ImportError as error:
            return f"{first_line(error)}; pip install matplotlib"
    return ""


def _print(evaluation: _Evaluation) -> None:
    """Print the scores, and the worst classes."""
    from training import scoring

    report = evaluation.report
    stored = evaluation.stored
    images = count(report.images, "image")
    if report.unreadable:
        images += f"; {report.unreadable} unreadable left out"
    about = f"{printable(str(stored.path))}, {stored.which} weights"
    print(f"{about}: {evaluation.title}  loss {report.loss:.4f}  ({images})")
    print(scoring.quality(report))
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


def _classify(options, paths: Sequence[str]) -> int:
    """Print the likeliest classes of each image, or write them to a table."""
    from data.named_files import NamedFiles
    from training import classes

    source = NamedFiles(paths)
    model = _opened(options)
    label_count = model.recipe.model.classes
    try:
        known = classes.of_model(model.stored, model.recipe.data, label_count)
    except DataError:  # neither the file nor the data names them
        known = classes.Known(tuple(f"class {label}" for label in range(label_count)))
    for note in (known.note, *source.notes):
        if note:
            print(note)
    try:
        if options.table:
            _write_predictions(Path(options.table), model, source, known.names)
        else:
            for prediction in _predictions(model, source, known.names, _print_left_out):
                print(prediction.line())
    finally:
        model.engine.close()
    return DONE


def _predictions(
    model: _Model,
    source: Any,
    names: Sequence[str],
    leave_out: Callable[[str], None],
) -> Iterator[Any]:
    """Yield a `training.predictions.Prediction` for each image that can be read.

    Args:
        model: that predicts.
        source: `data.named_files.NamedFiles`.
        names: of the model's classes, by label.
        leave_out: called with the fault of each image that cannot be read.

    Raises:
        DataError: an image cannot be read, and was named, or data.bad_images is `error`.
    """
    from data.loader import NotLeftOut
    from training import predictions

    recipe = model.recipe
    # Whoever names a file wants that one; a folder may hold files that nobody has looked at.
    if not source.has_folders:
        data = recipe.data.model_copy(update={"bad_images": "error"})
        recipe = recipe.model_copy(update={"data": data})
    try:
        yield from predictions.predict(model.engine, source, recipe, names, leave_out)
    except NotLeftOut as error:
        if source.has_folders:
            raise
        raise DataError(f"{error.reason}; name an image file") from None


def _write_predictions(path: Path, model: _Model, source: Any, names: Sequence[str]) -> None:
    """Write the table of `_predictions` to a CSV file, whole or not at all, and print its size."""
    from training.predictions import Table

    left_out = 0

    def leave_out(fault: str) -> None:
        """Count and print an image that is left out."""
        nonlocal left_out
        left_out += 1
        _print_left_out(fault)

    path.parent.mkdir(parents=True, exist_ok=True)
    # File names may hold bytes that are no UTF-8, but `printable` has made escapes of them.
    with replacing(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as stream:
        table = Table(stream, len(names))
        for prediction in _predictions(model, source, names, leave_out):
            table.add(prediction)
    images = count(len(source) - left_out, "image")
    if left_out:
        images += f"; {left_out} unreadable left out"
    print(f"{printable(str(path))}: {images}")


def _print_left_out(fault: str) -> None:
    """Print the path and fault of an image that is left out."""
    print(f"{fault}; left out")

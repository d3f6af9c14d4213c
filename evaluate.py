"""Scores trained weights, or classifies images:

    python evaluate.py --checkpoint runs/quickstart [section.key=value ...]
    python evaluate.py --checkpoint runs/quickstart --images FILE ...

PATH is a run folder (its newest checkpoint), a checkpoint, weights (.safetensors, a timm or torch file), or a program
that tools.export wrote (.onnx, .pt2). Weights that do not carry their recipe need --config. Exit codes are train.py's:
0 done, 1 failed, 2 wrong input.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import re
from pathlib import Path

from common.command import Parser, add_choice_of_weights, one_line
from common.errors import DONE, DataError
from common.files import writing
from common.json_io import json_text
from common.text import count, printable

_WORST = 10  # classes that the terminal shows; the file has all


@one_line()
def main(arguments=None) -> int:
    """Run the command; return its exit code."""
    parser = Parser(prog="evaluate.py", description="Score trained weights on validation images, or classify images.")
    kinds = "run folder, checkpoint, weights, .onnx, .pt2"
    parser.add_argument("--checkpoint", required=True, metavar="PATH", help=kinds)
    parser.add_argument("--config", metavar="FILE", help="recipe; default: the one that the run was trained by")
    add_choice_of_weights(parser)
    parser.add_argument("--images", nargs="+", default=[], metavar="FILE", help="classify these instead of scoring")
    parser.add_argument("--output", metavar="FOLDER", help="for tables and picture (default: in the run)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replaces a key of the recipe")
    options = parser.parse_intermixed_args(arguments)
    # argparse also takes the overrides behind --images for images.
    behind = [text for text in options.images if re.match(r"\w+\.\w+=", text) and not Path(text).exists()]
    options.overrides += behind
    options.images = [text for text in options.images if text not in behind]
    return _classify(options) if options.images else _score(options)


def _opened(options):
    """Return the file's model, its recipe, and the engine or program that predicts."""
    from training import exported, scoring, weights  # late: a wrong command line is refused before torch is loaded

    if Path(options.checkpoint).suffix in (exported.ONNX, exported.PROGRAM) and not options.best:
        model = exported.read(options.checkpoint, options.weights)
        recipe = weights.recipe_of(model, options.config, options.overrides)
        model.check(recipe.model)
        return model, recipe, model
    stored, recipe = weights.opened(
        options.checkpoint,
        options.weights,
        options.best,
        config=options.config,
        overrides=options.overrides,
    )
    for note in stored.notes:
        print(note)
    return stored, recipe, scoring.engine_with(stored, recipe)


def _score(options) -> int:
    from data.loader import EvaluationBatches
    from data.sources import open_source
    from training import classes, progress, scoring, weights

    stored, recipe, engine = _opened(options)
    known = classes.of_model(stored, recipe.data, recipe.model.classes)
    source = open_source(recipe.data, recipe.model.classes, "validation", known.names)
    for note in filter(None, (known.note, *source.notes)):
        print(note)
    size, batch = recipe.model.image_size, recipe.batch.evaluation
    batches = EvaluationBatches(source, data=recipe.data, image_size=size, batch=batch, device=engine.device)
    try:
        report = scoring.score(
            engine, progress.counted(batches, len(batches), "batches are scored"), recipe.model.classes
        )
    finally:
        batches.close()
        engine.close()
    title = scoring.accuracy(report.top1, report.top5, recipe.model.classes)
    left_out = f"; {report.unreadable} unreadable left out" if report.unreadable else ""
    rows = scoring.class_rows(report, source.classes)
    run_folder = weights.run_folder_of(stored.path)
    name = f"evaluation-{stored.path.name}" if run_folder and stored.path.parent.name == "export" else "evaluation"
    folder = Path(options.output or (run_folder or Path()) / name)
    summary = {"weights": stored.which, "file": str(stored.path), **report._asdict(), "notes": source.notes}
    del summary["confusion"]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        scoring.write_class_table(folder / "classes.csv", rows)
        scoring.draw_confusion(folder / "confusion.png", report, source.classes, title)
        (folder / "scores.json").write_text(json_text(summary, indent=1) + "\n")
    about = f"{printable(str(stored.path))}, {stored.which} weights"
    print(f"{about}: {title}  loss {report.loss:.4f}  ({count(report.images, 'image')}{left_out})")
    worst = [row for row in rows if row["top1"] is not None and row["top1"] < 1][:_WORST]
    width = max(len(row["class"]) for row in [{"class": "class"}, *worst])
    print(f"{'class':{width}}  images    top1  most often taken for" if worst else "every class: 100 %")
    for row in worst:
        taken_for = f"{row['taken_for']} ({count(row['times'], 'time')})"
        print(f"{row['class']:{width}}  {row['images']:6}  {row['top1']:6.1%}  {taken_for}")
    print(f"all classes, confusion and scores: {printable(str(folder))}/classes.csv, confusion.png, scores.json")
    return DONE


def _classify(options) -> int:
    import torch

    from data import damage
    from data.base import UnreadableImage
    from data.batches import MicroBatch
    from data.encoded import EncodedImage, read_image
    from data.transforms import Evaluation
    from training import classes
    from training.metrics import TOP

    stored, recipe, engine = _opened(options)
    try:
        known = classes.of_model(stored, recipe.data, recipe.model.classes)
    except DataError:  # neither the file nor the data names them
        known = classes.Known(tuple(f"class {label}" for label in range(recipe.model.classes)))
    if known.note:
        print(known.note)
    transform, size = Evaluation(recipe.data.crop_fraction), recipe.model.image_size
    for file in options.images:
        try:
            encoded = read_image(file)
        except UnreadableImage as error:
            raise DataError(f"{error}; name an image file") from None
        image = EncodedImage(encoded, printable(file))
        pixels = transform(image, size, epoch=0, index=0)[None].contiguous()
        damage.report([image.damage] if image.damage else [])
        none = torch.zeros(1, dtype=torch.int64)
        logits = engine.predict_step(MicroBatch(pixels, none, none, 1, 0, 0, ()))
        best = logits.softmax(1)[0].topk(min(TOP, recipe.model.classes))
        guesses = zip(best.values.tolist(), best.indices.tolist())
        print(f"{printable(file)}: " + ", ".join(f"{known.names[label]} {share:.1%}" for share, label in guesses))
    engine.close()
    return DONE

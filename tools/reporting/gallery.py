"""The sections with pictures: training images as the run received them, and misclassified validation images."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, List, Sequence, Tuple

from recipe.errors import ConfigError, UserError, first_line
from tools.reporting.drawing import label
from tools.reporting.page import Figure, Html, Section, note, plot, table, tag
from tools.reporting.run import Run
from tools.reporting.sections import share

if TYPE_CHECKING:
    from tools.reporting.pictures import Findings, Picture

_WORST = 12
_MOST_DRAWN = 200  # classes a side of a confusion matrix that can be pointed at
_MOST_COUNTED = 16  # classes up to which there is room for numbers in it
# What images, checkpoints and devices can fail with: the report is made all the same.
_FAILURES = (UserError, OSError, RuntimeError)


def collect(run: Run, count: int) -> Tuple[List[Section], dict]:
    """Both sections, and what is in them as data; where one cannot be made, it has the reason.

    Args:
        count: pictures of each kind, at most.
    """
    from tools.reporting import pictures  # loads torch

    shown: Sequence[Picture] = ()
    scored = None
    try:
        if run.recipe is None:
            raise ConfigError(run.complaint)
        shown = pictures.training_pictures(run.recipe, count)
        text = (
            f"{len(shown)} images as the first updates were given them: cropped, augmented and mixed. They are made "
            "again from the data, being a function of the recipe."
        )
        images = Section("images", "Images seen", [note(text), _pictures(shown, "training image")])
    except _FAILURES as error:
        images = Section("images", "Images seen", [_not_shown(error)])
    try:
        found = pictures.find_mistakes(run.folder, count)
    except _FAILURES as error:
        mistakes = Section("mistakes", "Validation images", [_not_shown(error)])
    else:
        scored = {
            "file": str(found.file),
            "images": found.report.images,
            "of": found.validation,
            "top1": found.report.top1,
            "top5": found.report.top5,
            "loss": found.report.loss,
            "missed": found.missed,
        }
        mistakes = Section("mistakes", "Validation images", *mistakes_content(found))
    return [images, mistakes], {"images_shown": len(shown), "scored": scored}


def _not_shown(error: BaseException) -> Html:
    reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
    return note(f"Not shown: {reason}")


def mistakes_content(found: Findings) -> Tuple[List[object], List[Figure]]:
    """Content and figures of the section about misclassified images."""
    from training.scoring import class_rows

    report, names = found.report, found.classes
    if report.images == found.validation:
        which, remark = f"all {report.images:,}", ""
    else:
        which = f"{report.images:,} random ones of {found.validation:,}"
        remark = " More would take longer than a minute here: evaluate.py scores them all."
    scores = f"top-1 {share(report.top1)}, top-5 {share(report.top5)}, {found.missed:,} misclassified."
    content: List[object] = [note(f"{found.file.name} classified {which} validation images: {scores}{remark}")]
    if not found.missed:
        return [*content, note("All of them were classified correctly.")], []
    worst = [row for row in class_rows(report, names) if row["images"] and row["top1"] < 1][:_WORST]
    rows = [
        (row["class"], row["images"], share(row["top1"]), f"{row['taken_for']} ({row['times']} times)") for row in worst
    ]
    heads = ("class", "images", "top-1", "most often taken for")
    content += [tag("h3", "Worst classes"), table(heads, rows, caption="Worst classes", numbers=(1, 2))]
    figures = [_confusion(found)] if len(names) <= _MOST_DRAWN else []
    content += [plot(figure, alone=True) for figure in figures] or [_confusion_picture(found)]
    how = "the most confident ones" if found.missed > len(found.pictures) else "the most confident first"
    content += [tag("h3", f"Misclassified images, {how}"), _pictures(found.pictures, "validation image")]
    return content, figures


def _confusion(found: Findings) -> Figure:
    """A cell per class and guess; empty where it never happened, coloured by its share of the class."""
    counts = found.report.confusion
    totals = counts.sum(1, keepdim=True).clamp(min=1)
    shades = (counts / totals).sqrt()  # the root lifts a few percent of mistakes out of the pale
    cells = counts.tolist()
    names = [label(name) for name in found.classes]
    data = {
        "type": "heatmap",
        "x": names,
        "y": names,
        "z": [
            [round(shade, 3) if count else None for shade, count in zip(*pair)] for pair in zip(shades.tolist(), cells)
        ],
        "text": [[count or "" for count in row] for row in cells],
        "zmin": 0,
        "zmax": 1,
        "colorscale": [[0, "#d6e6f2"], [0.4, "#56B4E9"], [1, "#0072B2"]],
        "showscale": False,
        "xgap": 1,
        "ygap": 1,
        "hovertemplate": "%{y} taken for %{x}: %{text} images<extra></extra>",
    }
    if len(names) <= _MOST_COUNTED:
        data["texttemplate"] = "%{text}"
    axis = {"type": "category", "automargin": True, "showgrid": False}
    layout = {
        "xaxis": {**axis, "title": {"text": "taken for"}},
        "yaxis": {**axis, "title": {"text": "class"}, "autorange": "reversed"},
        "height": max(300, min(900, 110 + 26 * len(names))),
        "showlegend": False,
    }
    caption = "Images of each class (rows) by what they were taken for (columns); the darker, the more of the row."
    summary = f"{int(counts.diagonal().sum())} of {found.report.images} images on the diagonal."
    return Figure("confusion", "Which class was taken for which", caption, summary, [data], layout)


def _confusion_picture(found: Findings) -> Html:
    """A picture for more classes than one could point at."""
    from tools.reporting.pictures import png_uri
    from training.scoring import draw_confusion

    stream = io.BytesIO()
    draw_confusion(stream, found.report, found.classes, f"top1 {found.report.top1:.2%}")
    image = tag("img", src=png_uri(stream), alt="Confusion matrix", style="width:100%")
    return tag("figure", image, class_="alone")


def _pictures(shown: Sequence[Picture], kind: str) -> Html:
    items = []
    for picture in shown:
        image = tag("img", src=picture.source, alt=f"{kind} {picture.name}", title=picture.name)
        items.append(tag("li", tag("figure", image, tag("figcaption", picture.caption))))
    return tag("ul", *items, class_="pictures")

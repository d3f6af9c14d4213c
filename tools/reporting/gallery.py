"""The sections with pictures: training images as they were shown, and misclassified validation images."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, List, NamedTuple, Optional, Sequence

from recipe.errors import ConfigError, UserError, first_line
from tools.reporting.drawing import Figure
from tools.reporting.markup import Html, label, note, share, table, tag
from tools.reporting.page import Section, plot
from tools.reporting.run import Run

if TYPE_CHECKING:
    from tools.reporting.mistakes import Findings
    from tools.reporting.pictures import Picture

_WORST = 12
_MOST_DRAWN = 200  # classes a side of a confusion matrix that can be pointed at
_MOST_COUNTED = 16  # classes up to which there is room for numbers in it
# What images, checkpoints and devices can fail with: the report is made all the same.
_FAILURES = (UserError, OSError, RuntimeError)


class Gallery(NamedTuple):
    """sections: of the page. shown: pictures of training images. scored: of the checkpoint; None if it was not."""

    sections: List[Section]
    shown: int
    scored: Optional[dict]


def collect(run: Run, count: int) -> Gallery:
    """Both sections; where one cannot be made, it says why. Args: count: pictures of each kind, at most."""
    shown, seen = _training_section(run, count)
    scored, judged = _validation_section(run, count)
    return Gallery([seen, judged], shown, scored)


def _training_section(run: Run, count: int) -> tuple:
    """How many training images are shown, and the section."""
    from tools.reporting import pictures  # loads torch

    title = "Images seen"
    try:
        if run.recipe is None:
            raise ConfigError(run.complaint)
        shown = pictures.training_pictures(run.recipe, count)
    except _FAILURES as error:
        return 0, Section("images", title, [note(f"Not shown: {_reason(error)}")])
    text = note(
        f"{len(shown)} images as the first updates were given them: cropped, augmented and mixed. They are made again "
        "from the data, being a function of the recipe."
    )
    return len(shown), Section("images", title, [text, _pictures(shown, "training image")])


def _validation_section(run: Run, count: int) -> tuple:
    """The scores, or None, and the section."""
    from tools.reporting import mistakes  # loads torch

    title = "Validation images"
    try:
        found = mistakes.find(run.folder, count)
    except _FAILURES as error:
        return None, Section("mistakes", title, [note(f"Not shown: {_reason(error)}")])
    report = found.report
    scored = {
        "file": str(found.file),
        "images": report.images,
        "of": found.validation,
        "top1": report.top1,
        "top5": report.top5,
        "loss": report.loss,
        "missed": found.missed,
    }
    content, figures = _findings(found)
    return scored, Section("mistakes", title, content, figures)


def _findings(found: Findings) -> tuple:
    from training.scoring import class_rows

    report, names = found.report, found.classes
    whole = report.images == found.validation
    which = f"all {report.images:,}" if whole else f"{report.images:,} random ones of {found.validation:,}"
    remark = "" if whole else " More would take longer than a minute here: evaluate.py scores them all."
    content: List[object] = [
        note(
            f"{found.file.name} classified {which} validation images: top-1 {share(report.top1)}, "
            f"top-5 {share(report.top5)}, {found.missed:,} misclassified.{remark}"
        )
    ]
    if not found.missed:
        return [*content, note("All of them were classified correctly.")], []
    worst = [row for row in class_rows(report, names) if row["images"] and row["top1"] < 1][:_WORST]
    rows = [
        (row["class"], row["images"], share(row["top1"]), f"{row['taken_for']} ({row['times']} times)") for row in worst
    ]
    heads = ("class", "images", "top-1", "most often taken for")
    content += [tag("h3", "Worst classes"), table(heads, rows, caption="Worst classes", numbers=(1, 2))]
    figures = []
    if len(names) <= _MOST_DRAWN:
        figures = [_confusion(found)]
        content.append(plot(figures[0], alone=True))
    else:
        content.append(_confusion_picture(found))
    how = "the most confident ones" if found.missed > len(found.pictures) else "the most confident first"
    content += [tag("h3", f"Misclassified images, {how}"), _pictures(found.pictures, "validation image")]
    return content, figures


def _confusion(found: Findings) -> Figure:
    """A cell per class and guess; empty where it never happened, coloured by its share of the class."""
    counts = found.report.confusion
    totals = counts.sum(1, keepdim=True).clamp(min=1)
    # The square root lifts a few percent of mistakes out of the pale.
    shades = (counts / totals).sqrt()
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
    right = int(counts.diagonal().sum())
    summary = f"{right} of {found.report.images} images on the diagonal."
    return Figure("confusion", "Which class was taken for which", caption, summary, [data], layout)


def _confusion_picture(found: Findings) -> Html:
    """A picture for more classes than one could point at."""
    from training.scoring import draw_confusion

    stream = io.BytesIO()
    draw_confusion(stream, found.report, found.classes, f"top1 {found.report.top1:.2%}")
    source = "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
    return tag("figure", tag("img", src=source, alt="Confusion matrix", style="width:100%"), class_="alone")


def _pictures(shown: Sequence[Picture], kind: str) -> Html:
    items = []
    for picture in shown:
        image = tag("img", src=picture.source, alt=f"{kind} {picture.name}", title=picture.name)
        items.append(tag("li", tag("figure", image, tag("figcaption", picture.caption))))
    return tag("ul", *items, class_="pictures")


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"

"""The page around the sections: one file that needs nothing else; the browser is forbidden to load anything."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import List, NamedTuple, Sequence

from recipe.errors import UserError
from tools.reporting.drawing import Figure
from tools.reporting.markup import Html, escaped, joined, script_data, tag

_HERE = Path(__file__).parent
# The browser itself keeps the page from loading anything from anywhere.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


class Section(NamedTuple):
    """A part of the page. key: its address. figures: those that `content` has a place for."""

    key: str
    title: str
    content: Sequence[object]
    figures: Sequence[Figure] = ()


def render(title: str, head: Html, sections: Sequence[Section], unit: str) -> str:
    """The whole page. Args: head: what stands above the table of contents. unit: of the time axis.

    Raises:
        UserError: plotly is not installed.
    """
    figures: List[Figure] = [figure for section in sections for figure in section.figures]
    links = (tag("li", tag("a", section.title, href=f"#{section.key}")) for section in sections)
    body = tag(
        "div",
        head,
        tag("nav", tag("ul", *links), aria_label="Contents"),
        tag("main", *(_section(section) for section in sections)),
        tag("footer", f"Written by tools.report on {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC."),
        class_="frame",
    )
    data = {"unit": unit, "figures": [figure.as_data() for figure in figures]}
    parts = (
        Html('<!DOCTYPE html>\n<html lang="en">\n<head>'),
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Html(_file("report.css"))),
        Html("</head>\n<body>\n"),
        body,
        Html("\n"),
        tag("script", script_data(data), type="application/json", id="figures"),
        tag("script", Html(_plotly())),
        tag("script", Html(_file("report.js"))),
        Html("\n</body>\n</html>\n"),
    )
    # Texts of JSON may have halves of letters, which no file can.
    return joined(parts).encode("utf-8", "backslashreplace").decode()


def plot(figure: Figure, alone: bool = False) -> Html:
    """The place of a figure, with its title, what it shows, and its figures in words. Args: alone: not in a grid."""
    return tag(
        "figure",
        tag("h3", figure.title),
        tag("div", id=f"plot-{figure.key}", class_="plot", role="img", aria_label=f"{figure.title}. {figure.summary}"),
        tag("figcaption", figure.caption),
        class_="alone" if alone else "whole" if figure.wide else None,
    )


def _section(section: Section) -> Html:
    return tag("section", tag("h2", section.title), *section.content, id=section.key)


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("the package plotly is not installed; pip install plotly") from None
    return get_plotlyjs()


def _file(name: str) -> str:
    text = (_HERE / name).read_text(encoding="utf-8")
    assert "</s" not in text, name  # it would end the element that it is put into
    return escaped(Html(text))

"""The page of a report: one file that needs nothing else, whose browser is forbidden to load anything.

All text is escaped on its way into the page unless it is markup (`Html`) already.
"""

from __future__ import annotations

import datetime
import html
import json
from pathlib import Path
from typing import Iterable, List, NamedTuple, Optional, Sequence

from recipe.errors import UserError

_HERE = Path(__file__).parent
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_EMPTY = ("img", "input", "meta", "link")


class Html(str):
    """Text that is markup already."""


class Figure(NamedTuple):
    """One figure of the page.

    key: its id. caption: what it shows. summary: its figures in words, for screen readers. data, layout: as plotly has
    them, except that `x` may be {"epoch": [...], "step": [...], "time": [...]}. marks: places of vertical lines, each
    such an object of numbers.
    """

    key: str
    title: str
    caption: str
    summary: str
    data: List[dict]
    layout: dict
    marks: Sequence[dict] = ()
    wide: bool = False


class Section(NamedTuple):
    """A part of the page. key: its address. figures: those that `content` has a place for."""

    key: str
    title: str
    content: List[object]
    figures: Sequence[Figure] = ()


def render(title: str, head: Html, sections: Sequence[Section], unit: str) -> str:
    """The whole page. Args: head: above the table of contents. unit: of the time axis.

    Raises:
        UserError: plotly is not installed.
    """
    links = (tag("li", tag("a", section.title, href=f"#{section.key}")) for section in sections)
    body = tag(
        "div",
        head,
        tag("nav", tag("ul", *links), aria_label="Contents"),
        tag("main", *(tag("section", tag("h2", each.title), *each.content, id=each.key) for each in sections)),
        tag("footer", f"Written by tools.report on {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC."),
        class_="frame",
    )
    figures = [
        {"key": figure.key, "data": figure.data, "layout": figure.layout, "marks": list(figure.marks)}
        for section in sections
        for figure in section.figures
    ]
    data = json.dumps({"unit": unit, "figures": figures}, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    for character in "&<>":  # so that nothing in it can end the <script>
        data = data.replace(character, f"\\u{ord(character):04x}")
    page = escaped(
        Html('<!DOCTYPE html>\n<html lang="en">\n<head>'),
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", _file("report.css")),
        Html("</head>\n<body>\n"),
        body,
        tag("script", Html(data), type="application/json", id="figures"),
        tag("script", Html(_plotly())),
        tag("script", _file("report.js")),
        Html("\n</body>\n</html>\n"),
    )
    # JSON may hold halves of surrogate pairs, which no file can.
    return page.encode("utf-8", "backslashreplace").decode()


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("the package plotly is not installed; pip install plotly") from None
    return get_plotlyjs()


def _file(name: str) -> Html:
    text = (_HERE / name).read_text(encoding="utf-8")
    assert "</s" not in text, name  # it would end the element that it is put into
    return Html(text)


def escaped(*contents: object) -> Html:
    """The contents one after the other, as markup."""
    return Html("".join(each if isinstance(each, Html) else html.escape(str(each)) for each in contents))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element: tag("td", "a < b", class_="number"). Attributes of value None are left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{given}>" if name in _EMPTY else f"<{name}{given}>{escaped(*children)}</{name}>")


def table(
    head: Sequence[object], rows: Iterable[Sequence[object]], *, caption: str, numbers: Sequence[int] = ()
) -> Html:
    """A table that scrolls by itself where the page is narrow. The first cell of each row names it.

    Args:
        caption: for screen readers; not shown.
        numbers: columns that hold numbers, from 0.
    """

    def cell(kind: str, column: int, content: object, scope: Optional[str] = None) -> Html:
        return tag(kind, content, scope=scope, class_="number" if column in numbers else None)

    heads = tag("tr", *(cell("th", column, content, "col") for column, content in enumerate(head)))
    lines = []
    for first, *others in rows:
        cells = [cell("td", column, content) for column, content in enumerate(others, start=1)]
        lines.append(tag("tr", cell("th", 0, first, "row"), *cells))
    whole = tag("table", tag("caption", caption, class_="unseen"), tag("thead", heads), tag("tbody", *lines))
    return tag("div", whole, class_="wide", tabindex="0", role="region", aria_label=caption)


def facts(pairs: Iterable[Sequence[object]]) -> Html:
    """A list of names and what they stand for."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs), class_="facts")


def folded(summary: str, *content: object) -> Html:
    """Content that is hidden until it is opened."""
    return tag("details", tag("summary", summary), *content)


def note(text: object) -> Html:
    """A remark on what is or is not shown."""
    return tag("p", text, class_="note")


def plot(figure: Figure, alone: bool = False) -> Html:
    """The place of a figure, with its title, caption and summary. Args: alone: not in a grid."""
    return tag(
        "figure",
        tag("h3", figure.title),
        tag("div", id=f"plot-{figure.key}", class_="plot", role="img", aria_label=f"{figure.title}. {figure.summary}"),
        tag("figcaption", figure.caption),
        class_="alone" if alone else "whole" if figure.wide else None,
    )


def grid(figures: Iterable[Figure]) -> Html:
    """The places of several figures."""
    return tag("div", *map(plot, figures), class_="figures")

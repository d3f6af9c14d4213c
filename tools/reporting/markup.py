"""HTML that is escaped unless it is markup already, and the format of figures and times on the page."""

from __future__ import annotations

import html
import json
import math
from typing import Iterable, List, Optional, Sequence

from tools import formats

_EMPTY = ("img", "input", "meta", "link", "br")


class Html(str):
    """Text that is markup already; all other text is escaped on its way into a page."""


def escaped(content: object) -> Html:
    """`content` as markup: itself if it is, else as text."""
    return content if isinstance(content, Html) else Html(html.escape(str(content)))


def joined(parts: Iterable[object]) -> Html:
    """Several, one after the other."""
    return Html("".join(escaped(part) for part in parts))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element: tag("td", "a < b", class_="number"). Attributes of value None are left out."""
    assert not (name in _EMPTY and children), name
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{given}>" if name in _EMPTY else f"<{name}{given}>{joined(children)}</{name}>")


def table(
    head: Sequence[object], rows: Iterable[Sequence[object]], *, caption: str, numbers: Sequence[int] = ()
) -> Html:
    """A table that scrolls by itself where the page is narrow. The first cell of each row names it.

    Args:
        caption: what screen readers say first; not shown.
        numbers: columns that hold numbers, from 0.
    """
    heads = [tag("th", cell, scope="col", class_=_number(column, numbers)) for column, cell in enumerate(head)]
    lines: List[Html] = []
    for row in rows:
        cells = [tag("th", row[0], scope="row", class_=_number(0, numbers))]
        cells += [tag("td", cell, class_=_number(column, numbers)) for column, cell in enumerate(row) if column]
        lines.append(tag("tr", *cells))
    title = tag("caption", caption, class_="unseen")
    whole = tag("table", title, tag("thead", tag("tr", *heads)), tag("tbody", *lines))
    return tag("div", whole, class_="wide", tabindex="0", role="region", aria_label=caption)


def facts(pairs: Iterable[Sequence[object]]) -> Html:
    """Names and what they stand for, a pair each."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs), class_="facts")


def more(summary: str, *content: object) -> Html:
    """Content that is folded until it is opened."""
    return tag("details", tag("summary", summary), *content)


def note(text: object) -> Html:
    """A remark on what is or is not shown."""
    return tag("p", text, class_="note")


def label(text: str) -> str:
    """Text for a figure: plotly reads a few tags of HTML, and entities, in all that it draws."""
    return html.escape(text, quote=False)


def script_data(data: object) -> Html:
    """JSON that can stand in a <script>: no character of it can end that element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return Html(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def number(value: Optional[float]) -> Optional[float]:
    """With the five digits that a figure can show; None for what JSON does not know."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None


def _number(column: int, numbers: Sequence[int]) -> Optional[str]:
    return "number" if column in numbers else None


def share(value: Optional[float]) -> Optional[str]:
    """0.9972 as `99.72 %`; None if unknown."""
    return None if value is None or value != value else formats.percent(value, 2)


def when(time: object) -> str:
    """`2026-11-22T04:34:01+00:00` as `2026-11-22 04:34:01 UTC`."""
    return str(time or "unknown").replace("T", " ").replace("+00:00", " UTC")


def listed(value: object) -> str:
    """A value of environment.json in one line."""
    if isinstance(value, list):
        return ", ".join(str(each) for each in value) or "none"
    return "not known" if value is None else str(value)

"""The page of a report: one file that loads no other; report.html is its template."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import List, NamedTuple, Sequence

import jinja2
from markupsafe import Markup

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.policies["json.dumps_kwargs"] = {
    "allow_nan": False,
    "ensure_ascii": False,
    "separators": (",", ":"),
}


class Figure(NamedTuple):
    """One figure of the page.

    key: its name, which links use.
    title: above it.
    caption: below it.
    data, layout: as plotly has them, but for `x`, which may be an object of `epoch`, `step` and
        `time`.
    marks: abscissae of vertical lines, each such an object.
    wide: it takes the whole width of the page.
    """

    key: str
    title: str
    caption: str
    data: List[dict]
    layout: dict
    marks: Sequence[dict] = ()
    wide: bool = False


def render(page: dict) -> str:
    """Render the whole page as HTML.

    Args:
        page: the values that report.html shows: see sections.py.
    """
    figures = [figure._asdict() for figure in (*page["curves"].figures, *page["layers"])]
    now = datetime.datetime.now(datetime.timezone.utc)
    template = _ENVIRONMENT.get_template("report.html")
    text = template.render(
        page=page,
        figures=figures,
        plotly=Markup(_plotly()),
        now=f"{now:%Y-%m-%d %H:%M}",
    )
    # JSON may hold halves of surrogate pairs, which no file can.
    return text.encode("utf-8", "backslashreplace").decode()


def _plotly() -> str:
    """Return plotly's JavaScript."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()

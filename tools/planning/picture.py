"""A plan's scaling as a picture: images a second beside the ideal, and where a step's time goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, List, NamedTuple

from tools import output
from tools.planning.scaling import Row
from tools.planning.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Part(NamedTuple):
    """How a part of a step's time is shown.

    words: in legends and tables.
    letter: in bars of text.
    colour: in pictures.
    """

    words: str
    letter: str
    colour: str


# In the order of a bar; Okabe and Ito's colours, distinct for the colour-blind as well.
PARTS = {
    "compute": Part("computing, forward and backward", "C", "#0072b2"),
    "input": Part("waiting for images", "I", "#f0e442"),
    "imbalance": Part("imbalance of the stages", "M", "#56b4e9"),
    "bubble": Part("pipeline filling and emptying", "B", "#bbbbbb"),
    "exchange": Part("exchange that is not hidden", "X", "#d55e00"),
    "straggling": Part("waiting for slower ranks", "S", "#cc79a7"),
    "update": Part("update", "U", "#009e73"),
    "rest": Part("rest, in no part", "r", "#4d4d4d"),
}


def draw(plan: Summary, path: Path) -> None:
    """Draw the scaling of a `plan`.

    Args:
        plan: of a recipe on a machine.
        path: of the picture.

    Raises:
        UserError: the name is that of no kind of picture.
        OSError: as the disk does.
    """
    figure = output.figure(path, (9, 7))
    rates, shares = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    _draw_rates(rates, plan.scaling)
    rates.set_title(f"{plan.recipe.run.name} on {plan.machine.name}")
    _draw_shares(shares, plan.scaling)
    output.save(figure, path)


def _draw_rates(axis: Axes, rows: List[Row]) -> None:
    """Draw the images a second beside those of ideal scaling."""
    replicas = [row.replicas for row in rows]
    images = [row.images_per_second for row in rows]
    # Ideal: as many times the rate of one replica.
    ideal = [images[0] * number for number in replicas]
    colour = PARTS["compute"].colour
    axis.plot(replicas, ideal, ls="--", color="#999999", label="ideal")
    axis.plot(replicas, images, "o-", color=colour, label="predicted")
    # Hollow points: another batch may learn otherwise, however fast it is.
    grown = [row for row in rows if row.grown]
    if grown:
        axis.plot(
            [row.replicas for row in grown],
            [row.images_per_second for row in grown],
            "o",
            mfc="white",
            color=colour,
            label="with a larger batch",
        )
    axis.set(xscale="log", yscale="log", ylabel="images/s")
    axis.legend(frameon=False)
    axis.grid(alpha=0.3)


def _draw_shares(axis: Axes, rows: List[Row]) -> None:
    """Draw the parts of a step, one upon the other."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    replicas = [row.replicas for row in rows]
    names = list(rows[0].parts)
    parts = []
    for name in names:
        parts.append([row.parts[name] / row.seconds for row in rows])
    colours = [PARTS[name].colour for name in names]
    axis.stackplot(replicas, parts, labels=names, colors=colours)
    axis.set(xlabel="replicas", ylabel="share of a step", ylim=(0, 1), xlim=(1, replicas[-1]))
    axis.legend(
        ncols=len(names),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.22),
        frameon=False,
        fontsize=8,
    )
    # All numbers of replicas, which are powers of two, instead of powers of ten.
    axis.set_xticks(replicas)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.xaxis.set_minor_locator(NullLocator())

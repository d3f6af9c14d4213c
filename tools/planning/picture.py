"""A plan's scaling as a picture: images a second beside the ideal, and where a step's time goes."""

from __future__ import annotations

from pathlib import Path

from tools import output
from tools.planning.summary import Summary

# Words, letter and colour of each part of a step, in the order of a bar; Okabe and Ito's colours, distinct for the
# colour-blind as well.
PARTS = {
    "compute": ("computing, forward and backward", "C", "#0072b2"),
    "input": ("waiting for images", "I", "#f0e442"),
    "imbalance": ("imbalance of the stages", "M", "#56b4e9"),
    "bubble": ("pipeline filling and emptying", "B", "#bbbbbb"),
    "exchange": ("exchange that is not hidden", "X", "#d55e00"),
    "straggling": ("waiting for slower ranks", "S", "#cc79a7"),
    "update": ("update", "U", "#009e73"),
    "rest": ("rest, in no part", "r", "#4d4d4d"),
}


def draw(plan: Summary, path: Path) -> None:
    """Write the picture. Raises UserError where the name is that of no kind of picture, OSError as the disk does."""
    figure = output.figure(path, (9, 7))
    from matplotlib.ticker import FuncFormatter, NullLocator

    rates, shares = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    replicas, images = zip(*((row.replicas, row.images_per_second) for row in plan.scaling))
    colour = PARTS["compute"][2]
    rates.plot(replicas, [images[0] * number for number in replicas], ls="--", color="#999999", label="ideal")
    rates.plot(replicas, images, "o-", color=colour, label="predicted")
    grown = [(row.replicas, row.images_per_second) for row in plan.scaling if row.grown]
    if grown:
        rates.plot(*zip(*grown), "o", mfc="white", color=colour, label="with a larger batch")
    rates.set(xscale="log", yscale="log", ylabel="images/s", title=f"{plan.recipe.run.name} on {plan.machine.name}")
    rates.legend(frameon=False)
    rates.grid(alpha=0.3)
    names = list(plan.step.parts)
    parts = [[row.parts[name] / row.seconds for row in plan.scaling] for name in names]
    shares.stackplot(replicas, parts, labels=names, colors=[PARTS[name][2] for name in names])
    shares.set(xlabel="replicas", ylabel="share of a step", ylim=(0, 1), xlim=(1, replicas[-1]))
    shares.legend(ncols=len(names), loc="upper center", bbox_to_anchor=(0.5, -0.22), frameon=False, fontsize=8)
    shares.set_xticks(replicas)
    shares.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    shares.xaxis.set_minor_locator(NullLocator())
    figure.savefig(path, dpi=110)

"""The findings as text for a terminal of 80 columns, and as one object for JSON."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from typing import Callable, Dict, NamedTuple, Optional

from rich.console import Console
from rich.table import Table
from rich.text import Text

from recipe.division import count
from tools.diagnosis import splitting
from tools.diagnosis.examination import Findings
from tools.diagnosis.picture import LOOKS
from tools.diagnosis.splitting import Spread
from tools.formats import duration, number, percent, scaled

_WIDTH = 80
_INDENT = 11  # of a line's text, behind its name
_MOST_RANKS = 16  # rows of the table of ranks


def render(found: Findings, config: str) -> None:
    """Print everything."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)

    def line(name: str, text: str, style: str = "") -> None:
        indent = " " * _INDENT
        for place, part in enumerate(textwrap.wrap(text, console.width - _INDENT)):
            console.print(Text(f"{name:<{_INDENT}}" if place == 0 else indent).append(part, style=style))

    about, on_cpu = found.about, found.about["device"] == "cpu"
    ranks, hosts = count(len(found.hosts), "rank"), count(len(set(found.hosts)), "host")
    kind = about["cpu"] if on_cpu else f"{about['device']}, {about['cpu']}"
    sizes = f"{count(about['cores'], 'core')}, {count(about['threads'], 'thread')}"
    line("recipe", f"{config}: {found.batch.describe()}")
    line("machine", f"{ranks} on {hosts}; {kind}, {sizes}, torch {about['torch']}")
    for note in found.notes:
        line("note", note)
    console.print()
    _print_step(console, line, found)
    line("images", _images(found))
    note = ", a copy in memory: there is no other device" if on_cpu else ""
    line("to device", f"{scaled(found.to_device.median, 'B/s')}{note}")
    line("links", _links(found))
    if found.methods:
        table = _table("exchange by itself", "measured", "fastest to slowest", "predicted, network")
        for each in found.methods:
            own = each.measured
            cells = (duration(own.median), _range(own)) if own else ("not measured", "")
            table.add_row(each.label, *cells, duration(each.candidate.network))
        _print_table(console, table)
    _print_ranks(console, found)
    line("straggling", f"{percent(found.straggling, 1)}: deviation of a replica's passes, over replicas and steps")
    line("next", _doubling(found))
    console.print()
    line("first", found.advice.text, "bold")


def as_data(found: Findings, config: str) -> dict:
    """One object with all figures; spreads have median, low, high and repetitions."""
    reading, links, batch, times = found.reading, found.links, found.batch, found.times
    steps = {}
    for name in ("as_trained", "waited", "from_memory", "without_exchange", "update"):
        values = getattr(times, name)
        steps[name] = splitting.spread(values)._asdict() if values else None
    return {
        "config": config,
        "machine": found.about,
        "hosts": sorted(set(found.hosts)),
        "batch": {key.rstrip("_"): value for key, value in dataclasses.asdict(batch).items()},
        "training_images": found.images,
        "images": {
            "per_core": reading.rate._asdict(),
            "tried": reading.tried,
            "unreadable": reading.unreadable,
            "bytes": reading.image_bytes,
            "share_of_reading": reading.share_of_bytes,
            "cached_bytes_per_second": _or_none(reading.cached),
            "disk_bytes_per_second": _or_none(reading.disk),
            "over_network": reading.remote,
        },
        "to_device_bytes_per_second": found.to_device._asdict(),
        "measured": {
            "accumulation": times.shape.accumulation,
            "waiting_is_complete": found.complete,
            "seconds": steps,
            "parts": splitting.parts(times),
        },
        "step_seconds": found.step,
        "images_per_second": found.images_per_second,
        "parts": found.parts,
        "peak_flops": found.peak._asdict(),
        "mfu": found.mfu,
        "ranks": [rank._asdict() for rank in found.ranks],
        "straggling": found.straggling,
        "links": links
        and {
            "latency": links.latency._asdict(),
            "bytes_per_second": links.bandwidth._asdict(),
            "between": "processes of one host" if links.loopback else "replicas",
        },
        "methods": [
            {
                "name": each.candidate.name,
                "label": each.label,
                "predicted": each.candidate.network,
                "measured": _or_none(each.measured),
            }
            for each in found.methods
        ],
        "next_doubling": _or_none(found.doubling),
        "advice": found.advice._asdict(),
        "notes": found.notes,
        "seconds": found.seconds,
    }


def _or_none(found: Optional[NamedTuple]) -> Optional[dict]:
    return found and found._asdict()


def _print_step(console: Console, line: Callable[..., None], found: Findings) -> None:
    """A step as a bar, and a line for each of its parts."""
    times, step = found.times, found.step
    own = splitting.spread(times.as_trained)
    spread = f" ({_range(own)}, {own.repetitions} times)"
    if times.shape.accumulation != found.batch.accumulation:
        micro_batches = count(times.shape.accumulation, "micro batch", "micro batches")
        spread = f", from steps of {micro_batches}: {duration(own.median)} ({_range(own)})"
    line("a step", f"{duration(step)}{spread}")
    rate = f"{number(found.images_per_second)} images/s"
    line("", f"{rate}, MFU {percent(found.mfu)} of {scaled(found.peak.median, 'FLOP/s')}")
    console.print(_bar(found.parts, console.width))
    table = Table(box=None, show_header=False, padding=(0, 1))
    for justify in ("left", "left", "right", "right"):
        table.add_column(justify=justify)
    for name, look in LOOKS.items():
        seconds = found.parts[name]
        if seconds:
            table.add_row(Text(look.letter, style=look.style), look.words, duration(seconds), percent(seconds / step))
    _print_table(console, table)
    if not found.complete:
        fault = "too few micro batches for all that was loaded ahead: waiting for images may be more"
        line("", f"{fault}; try more --seconds")
    console.print()


def _bar(parts: Dict[str, float], width: int) -> Text:
    """The parts side by side, each as many letters as it takes of the step; of negative ones nothing."""
    bar, edge, done = Text(), 0, 0.0
    total = sum(max(0.0, seconds) for seconds in parts.values())
    for name, seconds in parts.items():
        done += max(0.0, seconds)
        end = round(width * done / total)
        bar.append(LOOKS[name].letter * (end - edge), style=LOOKS[name].style)
        edge = end
    return bar


def _images(found: Findings) -> str:
    reading = found.reading
    text = f"{number(reading.rate.median)} a second of one core, read, decoded and augmented"
    if reading.unreadable:
        text += f" ({reading.unreadable:,} of {reading.tried:,} cannot be read and are left out)"
    if reading.image_bytes is None:
        return f"{text}; they are no files"
    text += f", from files of {scaled(reading.image_bytes, 'B')}"
    if reading.remote:
        return f"{text}, over the network at {scaled(reading.cached.median, 'B/s')}"
    disk = f"{scaled(reading.disk.median, 'B/s')} from the disk" if reading.disk else "the disk was not measurable"
    return f"{text}: {scaled(reading.cached.median, 'B/s')} out of the page cache, {disk}"


def _links(found: Findings) -> str:
    links = found.links
    if links is None:
        return "two processes of this host could not be connected: no link, and so no prediction"
    where = "between two processes of this host" if links.loopback else "between replicas"
    latency = f"latency {duration(links.latency.median)} ({_range(links.latency)})"
    return f"{latency}, {scaled(8 * links.bandwidth.median, 'bit/s')} {where}"


def _print_ranks(console: Console, found: Findings) -> None:
    """The ranks that fall behind most, where there are many."""
    rows = found.ranks
    if len(rows) > _MOST_RANKS:
        rows = sorted(rows, key=lambda row: row.lag or 0.0, reverse=True)[:_MOST_RANKS]
    table = _table("rank", "host", "forward, backward", "deviation", "behind others", text=2)
    for row in rows:
        who = f"{row.rank} (replica {row.replica}, stage {row.stage})"
        lag = "" if row.lag is None else f"{100 * row.lag:+.0f} %"
        table.add_row(who, Text(row.host), duration(row.mean), duration(row.deviation), lag)
    _print_table(console, table)


def _doubling(found: Findings) -> str:
    row = found.doubling
    if row is None:
        return "not predicted"
    grown = f", with batch.global={row.global_batch}" if row.grown else ""
    return (
        f"{count(row.replicas, 'replica')} are predicted to make {number(row.images_per_second)} images/s{grown}: "
        f"{percent(row.efficiency)} of one replica times {row.replicas}; limit: {row.limit}"
    )


def _range(found: Spread) -> str:
    return f"{duration(found.low)} to {duration(found.high)}"


def _table(*columns: str, text: int = 1) -> Table:
    """Args: text: columns to the left that are no numbers."""
    table = Table(box=None, padding=(0, 1), header_style="")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < text else "right", overflow="fold")
    return table


def _print_table(console: Console, table: Table) -> None:
    """Without the spaces with which rich fills its lines."""
    with console.capture() as captured:
        console.print(table)
    for row in captured.get().splitlines():
        console.file.write(f"{row.rstrip()}\n")

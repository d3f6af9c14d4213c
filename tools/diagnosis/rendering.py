"""The findings as text for a terminal of 80 columns, as one object for JSON, and as a picture."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path
from typing import Any, Dict, Iterator

from recipe.division import count
from tools.diagnosis import splitting
from tools.diagnosis.examination import Findings
from tools.diagnosis.splitting import Spread
from tools.formats import duration, number, percent, scaled
from tools.planning.picture import COLOURS
from tools.planning.text import table

_WIDTH = 80
_MOST_RANKS = 16, 64  # rows of the table of ranks, bars of the picture

_COLOURS = {**COLOURS, "rest": "#4d4d4d"}

# Words and letter of each part of a step, in the order of `splitting.PARTS`.
PARTS = {
    "compute": ("computing, forward and backward", "C"),
    "input": ("waiting for images", "I"),
    "imbalance": ("imbalance of the stages", "M"),
    "bubble": ("pipeline filling and emptying", "B"),
    "exchange": ("exchange that is not hidden", "X"),
    "straggling": ("waiting for slower ranks", "S"),
    "update": ("update", "U"),
    "rest": ("rest, in no part", "r"),
}


def lines(found: Findings, config: str) -> Iterator[str]:
    """Everything, in lines without spaces at their ends."""
    about, on_cpu = found.about, found.about["device"] == "cpu"
    kind = about["cpu"] if on_cpu else f"{about['device']}, {about['cpu']}"
    sizes = f"{count(about['cores'], 'core')}, {count(about['threads'], 'thread')}, torch {about['torch']}"
    ranks, hosts = count(len(found.hosts), "rank"), count(len(set(found.hosts)), "host")
    yield from _wrapped("recipe", f"{config}: {found.batch.describe()}")
    yield from _wrapped("machine", f"{ranks} on {hosts}; {kind}, {sizes}")
    for note in found.notes:
        yield from _wrapped("note", note)
    yield ""
    yield from _step(found)
    yield ""
    yield from _wrapped("images", _images(found))
    note = ", a copy in memory: there is no other device" if on_cpu else ""
    yield from _wrapped("to device", f"{scaled(found.to_device.median, 'B/s')}{note}")
    yield from _wrapped("links", _links(found))
    if found.methods:
        rows = [("exchange by itself", "measured", "fastest to slowest", "predicted, network")]
        for each in found.methods:
            own = each.measured
            cells = (duration(own.median), _range(own)) if own else ("not measured", "")
            rows.append((each.candidate.method.section.label, *cells, duration(each.candidate.network)))
        yield from table(rows, indent=" ", left=(0,))
    yield from _ranks(found)
    deviation = "deviation of a replica's passes, over replicas and steps"
    yield from _wrapped("straggling", f"{percent(found.straggling, 1)}: {deviation}")
    yield from _wrapped("next", _doubling(found))
    yield ""
    yield from _wrapped("first", found.advice.text)


def as_data(found: Findings, config: str) -> dict:
    """One object with all figures; spreads have median, low, high and repetitions."""
    links, times = found.links, found.times
    series = ("as_trained", "waited", "from_memory", "without_exchange", "update")
    values = {name: getattr(times, name) for name in series}
    fields = ("parts", "mfu", "ranks", "straggling", "advice", "notes", "seconds", "images_per_second")
    between = "processes of one host" if links and links.loopback else "replicas"
    data = {
        "config": config,
        "machine": found.about,
        "hosts": sorted(set(found.hosts)),
        "batch": {key.rstrip("_"): value for key, value in dataclasses.asdict(found.batch).items()},
        "training_images": found.images,
        "images": {**found.reading._asdict(), "share_of_reading": found.reading.share_of_bytes},
        "to_device_bytes_per_second": found.to_device,
        "measured": {
            "accumulation": times.shape.accumulation,
            "waiting_is_complete": found.complete,
            "seconds": {name: splitting.spread(each) if each else None for name, each in values.items()},
            "parts": splitting.parts(times),
        },
        "step_seconds": found.step,
        "peak_flops": found.peak,
        "links": links and {"latency": links.latency, "bytes_per_second": links.bandwidth, "between": between},
        "methods": [
            {
                "name": each.candidate.name,
                "label": each.candidate.method.section.label,
                "predicted": each.candidate.network,
                "measured": each.measured,
            }
            for each in found.methods
        ],
        "next_doubling": found.doubling,
        **{name: getattr(found, name) for name in fields},
    }
    return _plain(data)


def _plain(value: Any) -> Any:
    """With dictionaries in the place of named tuples."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return list(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _wrapped(name: str, text: str) -> Iterator[str]:
    """`text` in as many lines as it needs, behind its name."""
    return iter(textwrap.wrap(f"{name:<10} {text}", _WIDTH, subsequent_indent=" " * 11, drop_whitespace=True))


def _step(found: Findings) -> Iterator[str]:
    """A step as a bar, and a line for each of its parts."""
    times, step = found.times, found.step
    own = splitting.spread(times.as_trained)
    spread = f" ({_range(own)}, {own.repetitions} times)"
    if times.shape.accumulation != found.batch.accumulation:
        micro_batches = count(times.shape.accumulation, "micro batch", "micro batches")
        spread = f", from steps of {micro_batches}: {duration(own.median)} ({_range(own)})"
    yield from _wrapped("a step", f"{duration(step)}{spread}")
    rate = f"{number(found.images_per_second)} images/s"
    yield from _wrapped("", f"{rate}, MFU {percent(found.mfu)} of {scaled(found.peak.median, 'FLOP/s')}")
    yield bar(found.parts, _WIDTH)
    for name, (words, letter) in PARTS.items():
        seconds = found.parts[name]
        if seconds:
            yield f" {letter}  {words:<31}  {duration(seconds):>8}  {percent(seconds / step):>4}"
    if not found.complete:
        fault = "too few micro batches for all that was loaded ahead: waiting for images may be more"
        yield from _wrapped("", f"{fault}; try more --seconds")


def bar(parts: Dict[str, float], width: int) -> str:
    """The parts side by side, each as many letters as it takes of the step; of negative ones nothing."""
    text, done, total = "", 0.0, sum(max(0.0, seconds) for seconds in parts.values())
    for name, seconds in parts.items():
        done += max(0.0, seconds)
        text = text.ljust(round(width * done / total), PARTS[name][1])
    return text


def _images(found: Findings) -> str:
    reading = found.reading
    text = f"{number(reading.per_core.median)} a second of one core, read, decoded and augmented"
    if reading.unreadable:
        text += f" ({reading.unreadable:,} of {reading.tried:,} cannot be read and are left out)"
    if reading.bytes is None:
        return f"{text}; they are no files"
    text, cached = f"{text}, from files of {scaled(reading.bytes, 'B')}", reading.cached_bytes_per_second
    if reading.over_network:
        return f"{text}, over the network at {scaled(cached.median, 'B/s')}"
    disk = reading.disk_bytes_per_second
    from_disk = f"{scaled(disk.median, 'B/s')} from the disk" if disk else "the disk was not measurable"
    return f"{text}: {scaled(cached.median, 'B/s')} out of the page cache, {from_disk}"


def _links(found: Findings) -> str:
    links = found.links
    if links is None:
        return "two processes of this host could not be connected: no link, and so no prediction"
    where = "between two processes of this host" if links.loopback else "between replicas"
    latency = f"latency {duration(links.latency.median)} ({_range(links.latency)})"
    return f"{latency}, {scaled(8 * links.bandwidth.median, 'bit/s')} {where}"


def _ranks(found: Findings) -> Iterator[str]:
    """The ranks that fall behind most, where there are many."""
    shown = found.ranks
    if len(shown) > _MOST_RANKS[0]:
        shown = sorted(shown, key=lambda row: row.lag or 0.0, reverse=True)[: _MOST_RANKS[0]]
    rows = [("rank", "host", "forward, backward", "deviation", "behind others")]
    for row in shown:
        lag = "" if row.lag is None else f"{100 * row.lag:+.0f} %"
        who = f"{row.rank} (replica {row.replica}, stage {row.stage})"
        rows.append((who, row.host, duration(row.mean), duration(row.deviation), lag))
    yield from table(rows, indent=" ", left=(0, 1))


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


def draw(found: Findings, config: str, output: Path) -> None:
    """Write a PNG: a step now and after the next doubling of replicas, and how long each rank computes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    steps, ranks = figure.subplots(2, 1, height_ratios=(2, 1.4))
    bars = {f"{count(found.batch.replicas, 'replica')},\nmeasured": found.parts}
    if found.doubling is not None:
        row = found.doubling
        images = f"\nbatch {row.global_batch}" if row.grown else ""
        bars[f"{count(row.replicas, 'replica')},\npredicted{images}"] = row.parts
    for place, parts in enumerate(bars.values()):
        _stack(steps, place, parts)
    steps.set_yticks(range(len(bars)), list(bars))
    steps.invert_yaxis()
    steps.set_xlabel("milliseconds of a step")
    shown = [name for name in PARTS if any(parts.get(name, 0.0) > 0 for parts in bars.values())]
    handles = [steps.barh(0, 0, color=_COLOURS[name], label=PARTS[name][0]) for name in shown]
    steps.legend(handles=handles, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.22), frameon=False)
    steps.set_title(f"{config}: {found.images_per_second:,.0f} images/s", loc="left", parse_math=False)
    rows = found.ranks[: _MOST_RANKS[1]]
    numbers, means = [row.rank for row in rows], [1e3 * row.mean for row in rows]
    deviations = [1e3 * row.deviation for row in rows]
    ranks.bar(numbers, means, yerr=deviations, color=_COLOURS["compute"], width=0.6, capsize=3)
    ranks.set_xticks(numbers if len(numbers) <= 16 else numbers[:: len(numbers) // 8])
    ranks.set(xlabel="rank", ylabel="ms", xlim=(min(numbers) - 1, max(numbers) + 1))
    micro_batches = count(found.times.shape.accumulation, "micro batch", "micro batches")
    title = f"forward and backward passes of {micro_batches}, mean and deviation over steps"
    ranks.set_title(title, loc="left", fontsize=10)
    figure.suptitle(textwrap.fill(found.advice.text, 120), fontsize=9, x=0.01, ha="left", parse_math=False)
    figure.savefig(output, dpi=110)


def _stack(axis, place: int, parts: Dict[str, float]) -> None:
    """One bar, with the share of each part in it that is wide enough."""
    left, total = 0.0, sum(max(0.0, seconds) for seconds in parts.values())
    for name in PARTS:
        seconds = max(0.0, parts.get(name, 0.0))
        axis.barh(place, 1e3 * seconds, left=1e3 * left, color=_COLOURS[name], height=0.6)
        if seconds > 0.04 * total:
            colour = "w" if name in ("compute", "exchange", "update", "rest") else "k"
            text = f"{100 * seconds / sum(parts.values()):.0f} %"
            axis.text(1e3 * (left + seconds / 2), place, text, ha="center", va="center", color=colour)
        left += seconds

"""The findings as text for a terminal of 80 columns, as one object for JSON, and as a picture."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterator, List

from common.text import count
from tools import output as outputs
from tools.diagnosis import splitting
from tools.diagnosis.examination import Findings
from tools.diagnosis.images import Reading
from tools.diagnosis.links import Method
from tools.diagnosis.splitting import Rank, Spread
from tools.formats import duration, number, percent, scaled
from tools.planning.picture import PARTS
from tools.planning.scaling import Row
from tools.planning.text import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 80
_LABELLED = 0.04  # share of a step from which a part's percentage fits into its bar


def lines(findings: Findings, config: str) -> Iterator[str]:
    """Yield the report, line by line.

    Args:
        findings: of the examination.
        config: the recipe's file.
    """
    # What was measured, and where.
    yield from _wrapped("recipe", f"{config}: {findings.batch.describe()}")
    yield from _wrapped("machine", _machine(findings))
    for note in findings.notes:
        yield from _wrapped("note", note)
    yield ""
    yield from _step(findings)
    yield ""
    # What feeds and joins the devices.
    yield from _wrapped("images", _images(findings.reading))
    copying = scaled(findings.to_device.median, "B/s")
    if findings.about["device"] == "cpu":
        copying += ", a copy in memory: there is no other device"
    yield from _wrapped("to device", copying)
    yield from _wrapped("links", _links(findings))
    yield from _methods(findings.methods)
    yield from _ranks(findings.ranks)
    deviation = "deviation of a replica's passes, over replicas and steps"
    yield from _wrapped("straggling", f"{percent(findings.straggling, 1)}: {deviation}")
    # What follows.
    yield from _wrapped("next", _doubling(findings))
    yield ""
    yield from _wrapped("first", _first(findings))


def as_data(findings: Findings, config: str) -> Dict[str, Any]:
    """Return one object with all figures; spreads have median, low, high and repetitions.

    Args:
        findings: of the examination.
        config: the recipe's file.
    """
    # Other programs read these keys.
    reading = findings.reading
    data = {
        "config": config,
        "machine": findings.about,
        "hosts": sorted(set(findings.hosts)),
        "batch": _batch_data(findings),
        "training_images": findings.images,
        "images": {**reading._asdict(), "share_of_reading": reading.share_of_bytes},
        "to_device_bytes_per_second": findings.to_device,
        "measured": _times_data(findings),
        "step_seconds": findings.step,
        "peak_flops": findings.peak,
        "links": _links_data(findings),
        "methods": [_method_data(method) for method in findings.methods],
        "next_doubling": findings.doubling,
        "parts": findings.parts,
        "mfu": findings.mfu,
        "ranks": findings.ranks,
        "straggling": findings.straggling,
        "doubts": findings.doubts,
        "advice": findings.advice,
        "notes": findings.notes,
        "seconds": findings.seconds,
        "images_per_second": findings.images_per_second,
    }
    return _plain(data)


def draw(findings: Findings, config: str, output: Path) -> None:
    """Write a PNG: a step now and after the next doubling of replicas.

    Args:
        findings: of the examination.
        config: the recipe's file.
        output: the picture's.
    """
    figure = outputs.figure(output, (10, 3.8))
    panel = figure.subplots()
    _draw_bars(panel, _bars(findings))
    # The measured step on top.
    panel.invert_yaxis()
    panel.set_xlabel("milliseconds of a step")
    below = (0.5, -0.22)
    panel.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=below, frameon=False)
    title = f"{config}: {findings.images_per_second:,.0f} images/s"
    # Names of files may hold dollar signs, which matplotlib would read as formulae.
    panel.set_title(title, loc="left", parse_math=False)
    advice = textwrap.fill(_first(findings), 120)
    figure.suptitle(advice, fontsize=9, x=0.01, ha="left", parse_math=False)
    outputs.save(figure, output)


def _bars(findings: Findings) -> Dict[str, Dict[str, float]]:
    """Return the seconds of each part of the step now, and after the next doubling."""
    replicas = count(findings.batch.replicas, "replica")
    bars = {f"{replicas},\nmeasured": findings.parts}
    row = findings.doubling
    if row is not None:
        # A step with another batch is longer for that alone.
        batch = f"\nbatch {row.global_batch}" if row.grown else ""
        replicas = count(row.replicas, "replica")
        bars[f"{replicas},\npredicted{batch}"] = row.parts
    return bars


def bar(parts: Dict[str, float], width: int) -> str:
    """Return the parts side by side, each as many letters as it takes of the step.

    Of negative parts nothing is shown.

    Args:
        parts: seconds by name.
        width: letters in all.
    """
    total = sum(max(0.0, seconds) for seconds in parts.values())
    text = ""
    done = 0.0
    for name, seconds in parts.items():
        done += max(0.0, seconds)
        # Ends are rounded, not widths: the bar is exactly as wide as it should be.
        end = round(width * done / total)
        text = text.ljust(end, PARTS[name].letter)
    return text


def _batch_data(findings: Findings) -> Dict[str, Any]:
    """Return the batch by its keys in a recipe, where `global` needs no underscore."""
    batch = dataclasses.asdict(findings.batch)
    return {key.rstrip("_"): value for key, value in batch.items()}


def _times_data(findings: Findings) -> Dict[str, Any]:
    """Return the step that was measured."""
    times = findings.times
    seconds = {}
    for name in ("as_trained", "waited", "from_memory", "without_exchange", "update"):
        # Without an exchange there are no steps without it.
        values = getattr(times, name)
        seconds[name] = splitting.spread(values) if values else None
    return {
        "accumulation": times.accumulation,
        "waiting_is_complete": findings.complete,
        "seconds": seconds,
        "parts": splitting.parts(times),
    }


def _links_data(findings: Findings) -> Any:
    """Return the links; None where none could be measured."""
    links = findings.links
    if links is None:
        return None
    return {
        "latency": links.latency,
        "bytes_per_second": links.bandwidth,
        "between": "processes of one host" if links.loopback else "replicas",
    }


def _method_data(method: Method) -> Dict[str, Any]:
    """Return an exchange by itself."""
    candidate = method.candidate
    return {
        "name": candidate.name,
        "label": candidate.method.section.label,
        "predicted": candidate.network,
        "measured": method.measured,
    }


def _plain(value: Any) -> Any:
    """Return `value` with dictionaries in the place of named tuples."""
    # To json a named tuple is a list.
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _wrapped(name: str, text: str) -> List[str]:
    """Return the lines of a paragraph with a name in the margin."""
    return textwrap.wrap(f"{name:<10} {text}", _WIDTH, subsequent_indent=" " * 11)


def _range(spread: Spread) -> str:
    """Return the smallest and the largest repetition."""
    return f"{duration(spread.low)} to {duration(spread.high)}"


def _machine(findings: Findings) -> str:
    """Return ranks, hosts and their kind."""
    about = findings.about
    ranks = count(len(findings.hosts), "rank")
    hosts = count(len(set(findings.hosts)), "host")
    kind = about["cpu"]
    if about["device"] != "cpu":
        kind = f"{about['device']}, {kind}"
    sizes = f"{count(about['cores'], 'core')}, {count(about['threads'], 'thread')}"
    return f"{ranks} on {hosts}; {kind}, {sizes}, torch {about['torch']}"


def _step(findings: Findings) -> Iterator[str]:
    """Yield a step as a bar, and a line for each of its parts."""
    step = findings.step
    yield from _wrapped("a step", f"{duration(step)}{_origin(findings)}")
    rate = f"{number(findings.images_per_second)} images/s"
    peak = scaled(findings.peak.median, "FLOP/s")
    yield from _wrapped("", f"{rate}, MFU {percent(findings.mfu)} of {peak}")
    yield bar(findings.parts, _WIDTH)
    for name, part in PARTS.items():
        seconds = findings.parts[name]
        # Parts that the recipe cannot have are exactly 0.
        if seconds:
            share = percent(seconds / step)
            yield f" {part.letter}  {part.words:<31}  {duration(seconds):>8}  {share:>4}"
    if not findings.complete:
        few = "too few micro batches for all that was loaded ahead"
        yield from _wrapped("", f"{few}: waiting for images may be more; try more --seconds")


def _origin(findings: Findings) -> str:
    """Return how often a step was measured, and how much it varied."""
    times = findings.times
    measured = splitting.spread(times.as_trained)
    if times.accumulation == findings.batch.accumulation:
        return f" ({_range(measured)}, {measured.repetitions} times)"
    # A long step is computed from a shorter one, which is shown as well.
    micro_batches = count(times.accumulation, "micro batch", "micro batches")
    seconds = f"{duration(measured.median)} ({_range(measured)})"
    return f", from steps of {micro_batches}: {seconds}"


def _images(reading: Reading) -> str:
    """Return the rates of reading images."""
    rate = number(reading.per_core.median)
    text = f"{rate} a second of one core, read, decoded and augmented"
    if reading.unreadable:
        unreadable = f"{reading.unreadable:,} of {reading.tried:,}"
        text += f" ({unreadable} cannot be read and are left out)"
    if reading.bytes is None:
        return f"{text}; they are no files"
    size = scaled(reading.bytes, "B")
    read_again = reading.cached_bytes_per_second
    # Files whose bytes were counted were read again.
    assert read_again is not None
    cached = scaled(read_again.median, "B/s")
    again = f"{cached} read again (out of the page cache of a local disk)"
    # Files of other users, or on a network, cannot be dropped from the cache.
    from_disk = "the disk was not measurable"
    if reading.disk_bytes_per_second is not None:
        disk = scaled(reading.disk_bytes_per_second.median, "B/s")
        from_disk = f"{disk} from the disk"
    return f"{text}, from files of {size}: {again}, {from_disk}"


def _links(findings: Findings) -> str:
    """Return latency and bandwidth."""
    links = findings.links
    if links is None:
        return "two processes of this host could not be connected: no link, and so no prediction"
    latency = f"latency {duration(links.latency.median)} ({_range(links.latency)})"
    # Networks are known by their bits a second.
    median = scaled(8 * links.bandwidth.median, "bit/s")
    low = scaled(8 * links.bandwidth.low, "bit/s")
    high = scaled(8 * links.bandwidth.high, "bit/s")
    where = "between two processes of this host" if links.loopback else "between replicas"
    return f"{latency}, {median} ({low} to {high}) {where}"


def _methods(methods: List[Method]) -> Iterator[str]:
    """Yield a table of exchanges, if there are any."""
    if not methods:
        return
    rows = [("exchange by itself", "measured", "predicted, network")]
    for method in methods:
        measured = "not measured"
        if method.measured is not None:
            measured = duration(method.measured.median)
        label = method.candidate.method.section.label
        rows.append((label, measured, duration(method.candidate.network)))
    # Names are left-aligned, figures right-aligned.
    yield from table(rows, indent=" ", left=(0,))


def _ranks(ranks: List[Rank]) -> Iterator[str]:
    """Yield a table of ranks."""
    rows = [("rank", "host", "forward, backward", "deviation", "behind others")]
    for row in ranks:
        name = f"{row.rank} (replica {row.replica}, stage {row.stage})"
        # The only rank of a stage is behind nobody.
        lag = "" if row.lag is None else f"{100 * row.lag:+.0f} %"
        cells = (name, row.host, duration(row.mean), duration(row.deviation), lag)
        rows.append(cells)
    yield from table(rows, indent=" ", left=(0, 1))


def _doubling(findings: Findings) -> str:
    """Return the prediction for twice as many replicas, or that there is none."""
    row = findings.doubling
    if row is not None:
        return _prediction(row)
    return "not predicted, as the figures are in doubt" if findings.doubts else "not predicted"


def _prediction(row: Row) -> str:
    """Return the rate and the limit of a predicted step."""
    replicas = count(row.replicas, "replica")
    rate = number(row.images_per_second)
    grown = f", with batch.global={row.global_batch}" if row.grown else ""
    efficiency = f"{percent(row.efficiency)} of one replica times {row.replicas}"
    gain = f"are predicted to make {rate} images/s{grown}: {efficiency}"
    return f"{replicas} {gain}; limit: {row.limit}"


def _first(findings: Findings) -> str:
    """Return the advice, or why there is none."""
    if not findings.doubts:
        assert findings.advice is not None  # see `examination._concluded`
        return findings.advice.text
    reasons = "; ".join(findings.doubts)
    cause = "Something else may run on the machine"
    remedy = "stop that, or give more --seconds, and measure again"
    return f"No advice, and no machine.yaml is written: {reasons}. {cause}: {remedy}."


def _draw_bars(panel: Axes, bars: Dict[str, Dict[str, float]]) -> None:
    """Draw the parts of steps one after the other, a bar for each step.

    Args:
        panel: to draw on.
        bars: seconds of each part, by the name of a step.
    """
    names = list(bars)
    steps = [sum(parts.values()) for parts in bars.values()]
    lefts = [0.0] * len(bars)
    for name, part in PARTS.items():
        # A part may be negative, by rounding or as a rest, and a prediction has no rest.
        seconds = [max(0.0, parts.get(name, 0.0)) for parts in bars.values()]
        # Else the legend would name it.
        if not any(seconds):
            continue
        widths = [1e3 * value for value in seconds]
        drawn = panel.barh(
            names, widths, left=lefts, color=part.colour, height=0.6, label=part.words
        )
        shares = [value / step for value, step in zip(seconds, steps)]
        # Narrow parts have no room for a number.
        labels = [percent(share) if share > _LABELLED else "" for share in shares]
        panel.bar_label(drawn, labels, label_type="center")
        lefts = [left + width for left, width in zip(lefts, widths)]

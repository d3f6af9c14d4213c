"""The findings as text for a terminal of 80 columns, as one object for JSON, and as a picture."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path
from typing import Any, Dict, Iterator

from common.text import count
from tools import output as outputs
from tools.diagnosis import splitting
from tools.diagnosis.examination import Findings
from tools.diagnosis.splitting import Spread
from tools.formats import duration, number, percent, scaled
from tools.planning.picture import PARTS
from tools.planning.text import table

_WIDTH = 80


def lines(found: Findings, config: str) -> Iterator[str]:
    """The report, line by line."""
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
        rows = [("exchange by itself", "measured", "predicted, network")]
        for each in found.methods:
            own = duration(each.measured.median) if each.measured else "not measured"
            rows.append((each.candidate.method.section.label, own, duration(each.candidate.network)))
        yield from table(rows, indent=" ", left=(0,))
    yield from _ranks(found)
    deviation = "deviation of a replica's passes, over replicas and steps"
    yield from _wrapped("straggling", f"{percent(found.straggling, 1)}: {deviation}")
    yield from _wrapped("next", _doubling(found))
    yield ""
    yield from _wrapped("first", _first(found))


def as_data(found: Findings, config: str) -> dict:
    """One object with all figures; spreads have median, low, high and repetitions."""
    links, times = found.links, found.times
    series = ("as_trained", "waited", "from_memory", "without_exchange", "update")
    values = {name: getattr(times, name) for name in series}
    fields = ("parts", "mfu", "ranks", "straggling", "doubts", "advice", "notes", "seconds", "images_per_second")
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
            "accumulation": times.accumulation,
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
    """Named tuples become dictionaries."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return list(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _wrapped(name: str, text: str) -> Iterator[str]:
    return iter(textwrap.wrap(f"{name:<10} {text}", _WIDTH, subsequent_indent=" " * 11))


def _step(found: Findings) -> Iterator[str]:
    """A step as a bar, and a line for each of its parts."""
    times, step = found.times, found.step
    own = splitting.spread(times.as_trained)
    spread = f" ({_range(own)}, {own.repetitions} times)"
    if times.accumulation != found.batch.accumulation:
        micro_batches = count(times.accumulation, "micro batch", "micro batches")
        spread = f", from steps of {micro_batches}: {duration(own.median)} ({_range(own)})"
    yield from _wrapped("a step", f"{duration(step)}{spread}")
    rate = f"{number(found.images_per_second)} images/s"
    yield from _wrapped("", f"{rate}, MFU {percent(found.mfu)} of {scaled(found.peak.median, 'FLOP/s')}")
    yield bar(found.parts, _WIDTH)
    for name, (words, letter, _) in PARTS.items():
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
    cached, disk = reading.cached_bytes_per_second, reading.disk_bytes_per_second
    from_disk = f"{scaled(disk.median, 'B/s')} from the disk" if disk else "the disk was not measurable"
    again = f"{scaled(cached.median, 'B/s')} read again (out of the page cache of a local disk)"
    return f"{text}, from files of {scaled(reading.bytes, 'B')}: {again}, {from_disk}"


def _links(found: Findings) -> str:
    links = found.links
    if links is None:
        return "two processes of this host could not be connected: no link, and so no prediction"
    where = "between two processes of this host" if links.loopback else "between replicas"
    latency = f"latency {duration(links.latency.median)} ({_range(links.latency)})"
    median, low, high = (scaled(8 * each, "bit/s") for each in links.bandwidth[:3])
    return f"{latency}, {median} ({low} to {high}) {where}"


def _ranks(found: Findings) -> Iterator[str]:
    rows = [("rank", "host", "forward, backward", "deviation", "behind others")]
    for row in found.ranks:
        lag = "" if row.lag is None else f"{100 * row.lag:+.0f} %"
        who = f"{row.rank} (replica {row.replica}, stage {row.stage})"
        rows.append((who, row.host, duration(row.mean), duration(row.deviation), lag))
    yield from table(rows, indent=" ", left=(0, 1))


def _doubling(found: Findings) -> str:
    row = found.doubling
    if row is None:
        return f"not predicted{', as the figures are in doubt' if found.doubts else ''}"
    grown = f", with batch.global={row.global_batch}" if row.grown else ""
    return (
        f"{count(row.replicas, 'replica')} are predicted to make {number(row.images_per_second)} images/s{grown}: "
        f"{percent(row.efficiency)} of one replica times {row.replicas}; limit: {row.limit}"
    )


def _first(found: Findings) -> str:
    """The advice, or why there is none."""
    if not found.doubts:
        return found.advice.text
    remedy = "Something else may run on the machine: stop that, or give more --seconds, and measure again"
    return f"No advice, and no machine.yaml is written: {'; '.join(found.doubts)}. {remedy}."


def _range(found: Spread) -> str:
    return f"{duration(found.low)} to {duration(found.high)}"


def draw(found: Findings, config: str, output: Path) -> None:
    """Write a PNG: a step now and after the next doubling of replicas."""
    figure = outputs.figure(output, (10, 3.8))
    steps = figure.subplots()
    bars = {f"{count(found.batch.replicas, 'replica')},\nmeasured": found.parts}
    if found.doubling is not None:
        row = found.doubling
        images = f"\nbatch {row.global_batch}" if row.grown else ""
        bars[f"{count(row.replicas, 'replica')},\npredicted{images}"] = row.parts
    lefts = [0.0] * len(bars)
    for name, (words, _, colour) in PARTS.items():
        seconds = [max(0.0, parts.get(name, 0.0)) for parts in bars.values()]
        widths = [1e3 * each for each in seconds]
        if any(widths):
            drawn = steps.barh(list(bars), widths, left=lefts, color=colour, height=0.6, label=words)
            shares = [each / sum(parts.values()) for each, parts in zip(seconds, bars.values())]
            steps.bar_label(drawn, [percent(share) if share > 0.04 else "" for share in shares], label_type="center")
            lefts = [left + width for left, width in zip(lefts, widths)]
    steps.invert_yaxis()
    steps.set_xlabel("milliseconds of a step")
    steps.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.22), frameon=False)
    steps.set_title(f"{config}: {found.images_per_second:,.0f} images/s", loc="left", parse_math=False)
    figure.suptitle(textwrap.fill(_first(found), 120), fontsize=9, x=0.01, ha="left", parse_math=False)
    figure.savefig(output, dpi=110)

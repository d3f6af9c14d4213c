"""The machine that was measured: in words, and as the few figures that plans are made from."""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING, Any, Dict, NamedTuple, Optional, Sequence

import torch

from common import cores
from common.text import count
from recipe.config import Recipe
from recipe.division import Batch
from recipe.exchange import Exchange
from tools.diagnosis import splitting
from tools.planning import scaling
from tools.planning.machine import Figure, Machine, Rate, Reach
from tools.planning.workload import Workload

if TYPE_CHECKING:
    from tools.diagnosis.examination import Findings
    from tools.diagnosis.images import Reading
    from tools.diagnosis.links import Links, Method


def about(device: torch.device) -> Dict[str, Any]:
    """Return processor, cores, threads, torch and date, and the name of a `device`."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu": cores.processor(),
        "cores": cores.available(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": now.date().isoformat(),
    }


def described(
    recipe: Recipe,
    device: torch.device,
    work: Workload,
    findings: Findings,
) -> Machine:
    """Return the machine as plans have it.

    Args:
        recipe: as measured.
        device: of the main rank.
        work: of the recipe.
        findings: with links.
    """
    # Links may be missing where two processes of a host cannot connect.
    assert findings.links is not None
    facts = findings.about
    on_gpu = device.type == "cuda"
    name = facts["device" if on_gpu else "cpu"]
    ranks = len(findings.hosts)
    # All figures have this source, and some a clause of their own.
    source = f"measured by tools.doctor on {facts['date']}, {name}, {count(ranks, 'rank')}"
    # A run may use some of a host's GPUs only.
    ranks_of_host = findings.hosts.count(findings.hosts[0])
    devices_of_host = ranks_of_host
    if on_gpu:
        devices_of_host = max(ranks_of_host, torch.cuda.device_count())
    rates = _rates(recipe, work, findings)
    decoding = _decoding(recipe, findings.reading)
    copying = "" if on_gpu else "a copy in memory"
    return Machine(
        name=f"{ranks} x {name}",
        device="cuda" if on_gpu else "cpu",
        devices_per_host=devices_of_host,
        memory=_memory(device, ranks_of_host),
        rate=_rate(rates.multiply_adds, source),
        calibrated_on=_calibration(recipe, findings.batch),
        update=_rate(rates.updated, source),
        straggling=_figure(findings.straggling, source),
        links=[_reach(findings.links, len(set(findings.hosts)), source)],
        overlap=rates.overlap,
        cores=facts["cores"] / devices_of_host,
        decode=_rate(findings.reading.per_core.median, source, decoding),
        disk=_disk(findings.reading, source),
        to_device=_rate(findings.to_device.median, source, copying),
    )


class _Rates(NamedTuple):
    """Rates of one device, of its part of the model.

    multiply_adds: a second.
    updated: parameters a second that the optimizer steps.
    overlap: see `_overlap`.
    """

    multiply_adds: float
    updated: float
    overlap: float


def _rates(recipe: Recipe, work: Workload, findings: Findings) -> _Rates:
    """Return the rates that follow from the parts of a step."""
    times = findings.times
    measured = splitting.parts(times)
    micro_batch = measured["compute"] / times.accumulation
    multiply_adds = sum(stage.multiply_adds for stage in work.stages)
    # The largest stage is the last to be stepped, and the others wait for it.
    parameters = max(stage.parameters for stage in work.stages)
    # The exchange runs beside the slowest stage's backward pass.
    slowest = (1 + work.imbalance) * micro_batch
    backward = slowest * scaling.backward_share(work)
    return _Rates(
        # A stage has its share of the work, and takes as long as the mean of all.
        multiply_adds=findings.batch.micro * multiply_adds / (times.stages * micro_batch),
        updated=parameters / measured["update"],
        overlap=_overlap(recipe.exchange, findings.methods, measured["exchange"], backward),
    )


def _memory(device: torch.device, ranks: int) -> Figure:
    """Return the bytes of a device; on a CPU its share where `ranks` are on a host."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return _figure(total, "of the device")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _figure(total / ranks, f"of the host, over {count(ranks, 'rank')}")


def _overlap(
    section: Exchange,
    methods: Sequence[Method],
    exposed: float,
    backward: float,
) -> float:
    """Return the share of the last backward pass beside which the exchange runs.

    That is what it takes less than by itself.

    Args:
        section: of the exchange.
        methods: as measured by themselves.
        exposed: seconds that the exchange adds to a step.
        backward: seconds of the slowest stage's backward pass.
    """
    by_itself = None
    for method in methods:
        if method.candidate.name == section.variant:
            by_itself = method.measured
            break
    # A late exchange runs beside the next step: see `Exchange.beside`.
    if by_itself is None or section.delay:
        return 0.0
    # More than all of the pass cannot hide it; noise can make it less than nothing.
    hidden = by_itself.median - exposed
    return min(1.0, max(0.0, hidden / backward))


def _calibration(recipe: Recipe, batch: Batch) -> str:
    """Return what the rate was measured with, in words."""
    model = recipe.model
    precision = recipe.precision
    types = f"{precision.compute} compute, {precision.weights} weights"
    stages = f", {batch.stages} stages" if batch.stages > 1 else ""
    again = ", recomputed" if recipe.parallel.recompute else ""
    sizes = f"{model.image_size} px, micro batch {batch.micro}"
    return f"{model.describe()}, {sizes}, {types}{stages}{again}"


def _decoding(recipe: Recipe, reading: Reading) -> str:
    """Return what was decoded, in words."""
    text = f"one core, {recipe.data.source} at {recipe.model.image_size} px"
    if reading.bytes is not None:
        text += f", files of {reading.bytes / 1e3:.0f} kB read again"
    return text


def _disk(reading: Reading, source: str) -> Optional[Figure]:
    """Return the bytes a second from a disk; None where that was not measurable."""
    rate = reading.disk_bytes_per_second
    if rate is None:
        return None
    return _figure(rate.median, source, "files that were in no cache of the host")


def _reach(links: Links, hosts: int, source: str) -> Reach:
    """Return the links among all devices, on that many hosts."""
    # A plan for more hosts than were measured takes the links among processes of one for theirs:
    # the source says so.
    if hosts > 1:
        between = f"among {hosts} hosts"
    else:
        near = "among ranks of one host"
        if links.loopback:
            near = "between two processes of one host by gloo"
        between = f"{near}; links between hosts were not measured"
    return Reach(
        devices=None,
        latency=_figure(links.latency.median, source, between),
        bandwidth=_rate(links.bandwidth.median, source, between),
    )


def _figure(value: float, *sources: str) -> Figure:
    """Return a measured figure, whose source may have several clauses."""
    return Figure(value=_rounded(value), source=_joined(sources))


def _rate(value: float, *sources: str) -> Rate:
    """Return a measured rate, whose source may have several clauses."""
    return Rate(value=_rounded(value), source=_joined(sources))


def _rounded(value: float) -> float:
    """Return a number with as many digits as a measurement can have."""
    return float(f"{value:.5g}")


def _joined(clauses: Sequence[str]) -> str:
    """Return the clauses of a source that are not empty."""
    return ", ".join(text for text in clauses if text)

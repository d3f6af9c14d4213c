"""The machine that was measured: in words, and as the few figures that `tools.plan` makes its predictions from."""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING

import torch

from common import cores
from common.text import count
from recipe.config import Recipe
from tools.diagnosis import splitting
from tools.planning import scaling
from tools.planning.machine import Machine, Reach
from tools.planning.workload import Workload

if TYPE_CHECKING:
    from tools.diagnosis.examination import Findings


def about(device: torch.device) -> dict:
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu": cores.processor(),
        "cores": cores.available(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def described(recipe: Recipe, device: torch.device, work: Workload, found: Findings) -> Machine:
    """The machine as plans have it. Args: recipe: as measured. found: with links."""
    facts, reading, times, links = found.about, found.reading, found.times, found.links
    on_gpu, local, batch = device.type == "cuda", found.hosts.count(found.hosts[0]), found.batch
    name = facts["device" if on_gpu else "cpu"]
    source = f"measured by tools.doctor on {facts['date']}, {name}, {count(len(found.hosts), 'rank')}"
    if on_gpu:
        memory = _figure(torch.cuda.get_device_properties(device).total_memory, "of the device")
        local = max(local, torch.cuda.device_count())
    else:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        memory = _figure(whole / local, f"of the host, over {count(local, 'rank')}")
    measured = splitting.parts(times)
    micro_batch = measured["compute"] / times.accumulation  # of one device, of its part of the model
    passes = sum(stage.multiply_adds for stage in work.stages)
    disk = reading.disk_bytes_per_second
    images = f"one core, {recipe.data.source} at {recipe.model.image_size} px"
    if reading.bytes is not None:
        images += f", files of {reading.bytes / 1e3:.0f} kB read again"
    own = next((each.measured for each in found.methods if each.candidate.name == recipe.exchange.variant), None)
    overlap = 0.0
    if own is not None and not recipe.exchange.delay:
        # Share of the slowest stage's backward pass beside which the exchange runs: what it takes less than by itself.
        backward = (1 + work.imbalance) * micro_batch * scaling.backward_share(work)
        overlap = min(1.0, max(0.0, (own.median - measured["exchange"]) / backward))
    hosts = len(set(found.hosts))
    near = "between two processes of one host by gloo" if links.loopback else "among ranks of one host"
    between = f"among {hosts} hosts" if hosts > 1 else f"{near}; links between hosts were not measured"
    latency, bandwidth = (_figure(each.median, source, between) for each in (links.latency, links.bandwidth))
    model, precision = recipe.model, recipe.precision
    stages = f", {batch.stages} stages" if batch.stages > 1 else ""
    again = ", recomputed" if recipe.parallel.recompute else ""
    types = f"{precision.compute} compute, {precision.weights} weights{stages}{again}"
    return Machine(
        name=f"{len(found.hosts)} x {name}",
        device=device.type,
        devices_per_host=local,
        memory=memory,
        rate=_figure(batch.micro * passes / (times.stages * micro_batch), source),
        calibrated_on=f"{model.describe()}, {model.image_size} px, micro batch {batch.micro}, {types}",
        update=_figure(max(stage.parameters for stage in work.stages) / measured["update"], source),
        straggling=_figure(found.straggling, source),
        links=[Reach(devices=None, latency=latency, bandwidth=bandwidth)],
        overlap=overlap,
        cores=facts["cores"] / local,
        decode=_figure(reading.per_core.median, source, images),
        disk=disk and _figure(disk.median, source, "files that were in no cache of the host"),
        to_device=_figure(found.to_device.median, source, "" if on_gpu else "a copy in memory"),
    )


def _figure(value: float, *source: str) -> dict:
    """A `Figure` with as many digits as a measurement can have."""
    return {"value": float(f"{value:.5g}"), "source": ", ".join(filter(None, source))}

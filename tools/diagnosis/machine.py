"""The machine that was measured: in words, and as the few figures that `tools.plan` makes its predictions from."""

from __future__ import annotations

import datetime
import os
import platform
from collections import Counter
from typing import Optional, Sequence

import torch

from recipe.config import Recipe
from recipe.division import Batch, count
from tools.diagnosis import splitting
from tools.diagnosis.images import Reading
from tools.diagnosis.links import Links, Method
from tools.diagnosis.splitting import Spread, Times
from tools.planning import scaling
from tools.planning.machine import Figure, Machine, Reach
from tools.planning.workload import Workload


def about(device: torch.device) -> dict:
    """Hardware and versions that the figures depend on."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu": _cpu(),
        "cores": cores(),
        "threads": threads(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads() -> int:
    """Threads in which torch computes on a CPU."""
    return torch.get_num_threads()


def described(
    recipe: Recipe,
    batch: Batch,
    device: torch.device,
    hosts: Sequence[str],
    times: Times,
    work: Workload,
    reading: Reading,
    to_device: Spread,
    links: Links,
    method: Optional[Method],
) -> Machine:
    """The machine as plans know it.

    Args:
        hosts: name of each rank's.
        method: of the recipe's exchange, where there are several replicas.
    """
    source, local = _source(device, hosts), Counter(hosts)[hosts[0]]
    own_cores = cores() / local
    if device.type == "cuda":
        memory = _figure(torch.cuda.get_device_properties(device).total_memory, "of the device")
        local = max(local, torch.cuda.device_count())
        own_cores = cores() / local
    else:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        memory = _figure(whole / local, f"of the host, over {count(local, 'rank')}")
    measured = splitting.parts(times)
    micro_batch = measured["compute"] / times.shape.accumulation  # of one device, of its part of the model
    passes = sum(stage.multiply_adds for stage in work.stages)
    return Machine(
        name=f"{len(hosts)} x {_device(device)}",
        device=device.type,
        devices_per_host=local,
        memory=memory,
        rate=_figure(batch.micro * passes / (times.shape.stages * micro_batch), source),
        calibrated_on=_calibration(recipe, batch),
        update=_figure(max(stage.parameters for stage in work.stages) / measured["update"], source),
        straggling=_figure(splitting.straggling(times, batch.accumulation), source),
        links=[
            Reach(
                devices=None,
                latency=_figure(links.latency.median, f"{source}, {_between(links, hosts)}"),
                bandwidth=_figure(links.bandwidth.median, f"{source}, {_between(links, hosts)}"),
            )
        ],
        overlap=0.0 if recipe.exchange.delay else _overlap(measured["exchange"], method, _backward(work, micro_batch)),
        cores=own_cores,
        decode=_figure(reading.rate.median, f"{source}, one core, {_images(recipe, reading)}"),
        disk=_disk(reading, source),
        to_device=_figure(to_device.median, source + ("" if device.type == "cuda" else ", a copy in memory")),
    )


def _figure(value: float, source: str) -> Figure:
    """With as many digits as a measurement can have."""
    return Figure(value=float(f"{value:.5g}"), source=source)


def _source(device: torch.device, hosts: Sequence[str]) -> str:
    return f"measured by tools.doctor on {about(device)['date']}, {_device(device)}, {count(len(hosts), 'rank')}"


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()


def _cpu() -> str:
    """The processor's name. Arm's cpuinfo and other systems than Linux have none."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            for line in stream:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    return platform.machine()


def _calibration(recipe: Recipe, batch: Batch) -> str:
    model = recipe.model
    stages = f", {batch.stages} stages" if batch.stages > 1 else ""
    again = ", recomputed" if recipe.parallel.recompute else ""
    return (
        f"{model.name}, width {model.width:g}, depth {model.depth:g}, groups of {model.group_size}, "
        f"{model.image_size} px, micro batch {batch.micro}, {recipe.precision.compute} compute, "
        f"{recipe.precision.weights} weights{stages}{again}"
    )


def _between(links: Links, hosts: Sequence[str]) -> str:
    if links.loopback:
        return "between two processes of one host by gloo; links between hosts were not measured"
    if len(set(hosts)) == 1:
        return "among ranks of one host; links between hosts were not measured"
    return f"among {len(set(hosts))} hosts"


def _backward(work: Workload, micro_batch: float) -> float:
    """Seconds of the slowest stage's backward pass, as `tools.planning.scaling` has it.

    Args:
        micro_batch: seconds of one, the mean over stages.
    """
    return (1 + work.imbalance) * micro_batch * scaling.backward_share(work)


def _overlap(exposed: float, method: Optional[Method], backward: float) -> float:
    """Share of a micro batch's backward pass beside which the exchange runs: what it takes less than by itself.

    Args:
        exposed: seconds that the exchange adds to a step.
        method: the same exchange by itself; None or not measured: nothing is known to run beside the pass.
        backward: seconds.
    """
    if method is None or method.measured is None:
        return 0.0
    return min(1.0, max(0.0, (method.measured.median - exposed) / backward))


def _images(recipe: Recipe, reading: Reading) -> str:
    size = f"at {recipe.model.image_size} px"
    if reading.image_bytes is None:
        return f"{recipe.data.source} {size}"
    where = "over the network" if reading.remote else "out of the page cache"
    return f"files of {reading.image_bytes / 1e3:.0f} kB {where}, {size}"


def _disk(reading: Reading, source: str) -> Optional[Figure]:
    if reading.remote:
        return _figure(reading.cached.median, f"{source}, over the network")
    if reading.disk is None:
        return None
    return _figure(reading.disk.median, f"{source}, files that were in no cache of the host")

"""The processor: its name, and how many cores this process may keep busy: no more than its control
group pays for.

A container with a quota of one core still sees all cores of its host. Threads that wait for each
other then use up the quota while they spin, and all stand still for the rest of each period.
"""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path, PurePosixPath
from typing import Dict, Iterator, List, Optional, Tuple


def processor(root: str = "/") -> str:
    """Return the processor's name, as `AMD EPYC`; its architecture where the system tells no name
    (Arm, macOS).

    Args:
        root: the folder that holds `proc`.
    """
    with contextlib.suppress(OSError, ValueError):  # not Linux, or nothing that can be read
        for line in (Path(root) / "proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.machine()


def available(root: str = "/") -> int:
    """Return the number of cores to use: of the affinity, no more than the quota allows; at least
    1.

    A quota of 1.5 cores counts as 1: two threads that wait for each other would stand still for a
    quarter of the time, and what is left over goes to the processes that read images.

    Args:
        root: the folder that holds `proc` and `sys`.
    """
    return within_quota(_of_affinity(), root)


def within_quota(cores: int, root: str = "/") -> int:
    """Return how many of `cores` the quota pays for; see `available`."""
    limit = quota(root)
    return cores if limit is None else max(1, min(cores, int(limit)))


def limited(root: str = "/") -> Optional[int]:
    """Return `available(root)`, or None where that is all that libraries count by themselves: the
    affinity.
    """
    cores = available(root)
    return cores if cores < _of_affinity() else None


def quota(root: str = "/") -> Optional[float]:
    """Return the cores that this process's control groups below `root` pay for; None without a
    limit.

    The least of all levels counts.

    Sources: Linux, Documentation/admin-guide/cgroup-v2.rst (cpu.max) and scheduler/sched-bwc.rst
    (cpu.cfs_quota_us).
    """
    # A group inherits the limits of those around it without showing them.
    limits: List[float] = []
    with contextlib.suppress(OSError, ValueError):  # not Linux, or nothing that can be read
        for folder, version in _groups(Path(root)):
            limit = _limit(folder, version)
            if limit is not None:
                limits.append(limit)
    return min(limits, default=None)


def _of_affinity() -> int:
    """Return how many cores this process may run on, whatever they are paid for."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _groups(root: Path) -> Iterator[Tuple[Path, int]]:
    """Yield (folder, version of cgroups) of all groups that this process is in and that have the
    processor.
    """
    paths = _paths(root)
    for line in (root / "proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        kind, *_, options = after.split(" ")
        version = {"cgroup2": 2, "cgroup": 1}.get(kind)
        if version not in paths:
            continue
        if version == 1 and "cpu" not in options.split(","):
            continue
        top, mount = (path.replace("\\040", " ") for path in before.split(" ")[3:5])
        place = root / mount.lstrip("/")
        for group in _below(top, paths[version]):
            yield place / group, version


def _paths(root: Path) -> Dict[int, str]:
    """Return the path of this process's group that has the processor, by version of cgroups."""
    # Version 2 has one line without controllers; with version 1 each controller may have a group.
    paths = {}
    for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[2] = path
        elif "cpu" in controllers.split(","):
            paths[1] = path
    return paths


def _below(top: str, path: str) -> List[PurePosixPath]:
    """Return the group `path` and all above it, relative to the mounted group `top`, from the
    highest on.
    """
    try:
        relative = PurePosixPath(path).relative_to(top)
    except ValueError:  # the mount shows the container's own group, the path is the host's
        relative = PurePosixPath()
    if ".." in relative.parts:  # the group lies outside of the namespace's
        relative = PurePosixPath()
    return [*reversed(relative.parents), relative]


def _limit(folder: Path, version: int) -> Optional[float]:
    """Return the cores by the quota of one group; None where it has none."""
    try:
        if version == 2:
            amount, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            amount = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8")
            period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8")
        cores = int(amount) / int(period)
    # The highest group has no such file, and "max" is no number.
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return cores if cores > 0 else None  # -1: no limit

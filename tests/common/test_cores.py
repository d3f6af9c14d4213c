"""Cores by affinity and by the quotas of control groups, as different container systems show
them."""

import contextlib
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common import cores
from tests.conftest import ROOMS, ROOT

V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
MEMORY = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
ROOT_MOUNT = "23 1 0:3 / / rw - ext4 /dev/vda rw"


def machine(folder, groups, mounts, files):
    """A faked root: lines of /proc/self/cgroup and mountinfo, and {path below sys/fs/cgroup:
    content}."""
    proc = folder / "proc" / "self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text("\n".join(groups) + "\n")
    (proc / "mountinfo").write_text("\n".join([ROOT_MOUNT, *mounts]) + "\n")
    for name, content in files.items():
        path = folder / "sys" / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return str(folder)


def of_v1(folder, amount, period=100000):
    return {
        f"cpu,cpuacct/{folder}cpu.cfs_quota_us": amount,
        f"cpu,cpuacct/{folder}cpu.cfs_period_us": period,
    }


HOSTS_PATH = "4:cpu,cpuacct:/docker/1f2e"


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "expected"),
    [
        # A container with a namespace of its own sees itself as the highest group.
        (["0::/"], [V2], {"cpu.max": "200000 100000"}, 2.0),
        (["0::/"], [V2], {"cpu.max": "150000 100000"}, 1.5),
        (["0::/"], [V2], {"cpu.max": "max 100000"}, None),
        (["0::/"], [V2], {}, None),  # a host
        # The least of all levels counts.
        (
            ["0::/a.slice/b"],
            [V2],
            {"a.slice/cpu.max": "300000 100000", "a.slice/b/cpu.max": "max 100000"},
            3.0,
        ),
        (
            ["0::/a.slice/b"],
            [V2],
            {"a.slice/cpu.max": "50000 50000", "a.slice/b/cpu.max": "400000 100000"},
            1.0,
        ),
        (["0::/../other"], [V2], {"cpu.max": "200000 100000"}, 2.0),
        # Version 1: docker shows the host's path, and mounts the container's own group or all of
        # them.
        (["4:cpu,cpuacct:/"], [V1], of_v1("", 250000), 2.5),
        (["4:cpu,cpuacct:/"], [V1], of_v1("", -1), None),
        ([HOSTS_PATH], [V1.replace(" / ", " /docker/1f2e ", 1)], of_v1("", 100000, 50000), 2.0),
        ([HOSTS_PATH], [V1], {**of_v1("docker/", -1), **of_v1("docker/1f2e/", 100000)}, 1.0),
        ([HOSTS_PATH], [V1.replace(" / ", " /kubepods/77 ", 1)], of_v1("", 100000), 1.0),
        # Both versions: the processor is with the first.
        (["0::/x", "4:cpu,cpuacct:/x", "3:memory:/y"], [MEMORY, V1, V2], of_v1("x/", 300000), 3.0),
        # What cannot be read is no limit.
        (["0::/"], [V2], {"cpu.max": "many"}, None),
        (["0::/"], [V2], {"cpu.max": "100000 0"}, None),
        (["nonsense"], [V2], {"cpu.max": "100000 100000"}, None),
    ],
)
def test_the_least_quota_of_all_groups_counts(tmp_path, groups, mounts, files, expected):
    assert cores.quota(machine(tmp_path, groups, mounts, files)) == expected


@pytest.mark.parametrize(
    ("quota", "affinity", "available", "limited"),
    [
        ("max", 8, 8, None),
        ("800000", 8, 8, None),
        ("1600000", 8, 8, None),
        ("400000", 8, 4, 4),
        ("150000", 8, 1, 1),  # two threads would stand still for a quarter of the time
        ("50000", 8, 1, 1),
        ("400000", 2, 2, None),
        ("50000", 1, 1, None),
    ],
)
def test_no_more_threads_than_the_quota_pays_for(
    tmp_path, monkeypatch, quota, affinity, available, limited
):
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda process: set(range(affinity)), raising=False
    )
    root = machine(tmp_path, ["0::/"], [V2], {"cpu.max": f"{quota} 100000"})
    assert (cores.available(root), cores.limited(root)) == (available, limited)


X86 = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\nstepping\t: 1\n"
ARM = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [(X86, "AMD EPYC"), (ARM, platform.machine()), (None, platform.machine())],
    ids=["x86", "Arm", "not Linux"],
)
def test_the_name_of_the_processor(cpuinfo, name, tmp_path):
    if cpuinfo is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc" / "cpuinfo").write_text(cpuinfo)
    assert cores.processor(str(tmp_path)) == name


def test_no_control_groups_at_all(tmp_path):
    assert cores.quota(str(tmp_path)) is None
    assert cores.available(str(tmp_path)) >= 1


def test_a_real_group_of_this_machine():
    """A group of one core within one of three halves, which Linux itself makes; only root can."""
    outer = Path("/sys/fs/cgroup/cpu") / f"tests-{os.getpid()}"
    inner = outer / "inner"
    with contextlib.ExitStack() as stack:
        try:
            for folder, amount in ((outer, 150000), (inner, 100000)):
                folder.mkdir()
                stack.callback(folder.rmdir)
                (folder / "cpu.cfs_quota_us").write_text(str(amount))
        except OSError as error:
            pytest.skip(f"needs the right to make a control group ({error})")
        found = {}
        for folder in (inner, outer):
            enter = f"open({str(folder / 'cgroup.procs')!r}, 'w').write('0')"
            code = f"{enter}; from common import cores; print(cores.quota())"
            done = subprocess.run(
                [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
            )
            found[folder.name] = float(done.stdout)
    assert found == {"inner": 1.0, outer.name: 1.5}


def test_nobody_else_counts_cores():
    """Whoever counted for itself would overlook a quota."""
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    counting = re.compile(r"cpu_count\(|len\(os\.sched_getaffinity|\bnproc\b(?!-per)")
    counted = {str(path.relative_to(ROOT)) for path in files if counting.search(path.read_text())}
    # the latter for an affinity: which, not how many
    assert counted == {"common/cores.py", "training/relaunch.py"}
    assert not any(
        counting.search((ROOT / name).read_text())
        for name in ("run_tests.sh", "run_pod.sh", "tools/environment.sh")
    )

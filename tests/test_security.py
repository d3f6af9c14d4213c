"""What a run shows to others: the sockets it listens at, the files it leaves, the packages it is
made of."""

import contextlib
import os
import re
import socket
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.processes import tree
from engines.torch_engine import TorchEngine
from parallel.parent_death import bound_to_parent
from tests.conftest import ROOT, TINY
from training.run import run

LISTENS = "0A"  # state of a socket in /proc/net/tcp


def listening(processes):
    """Addresses at which they listen."""
    inodes = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(entry)))
    found = set()
    for name, family, unpack in (("tcp", socket.AF_INET, "<I"), ("tcp6", socket.AF_INET6, "<4I")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and fields[9] in inodes:
                words = struct.unpack(
                    unpack.replace("<", ">"), bytes.fromhex(fields[1].partition(":")[0])
                )
                found.add(socket.inet_ntop(family, struct.pack(unpack, *words)))
    return found


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_of_one_host_listen_at_the_loopback_only(tmp_path):
    """Launcher, stores and gloo, looked at until the run ends; they are there, and nothing is open
    to others."""
    command = [
        sys.executable,
        "-m",
        "tools.launch",
        "--replicas",
        "2",
        "--config",
        "configs/quickstart.yaml",
        *TINY,
    ]
    command += ["run.device=cpu", f"run.output={tmp_path / 'run'}"]
    pod = subprocess.Popen(
        bound_to_parent(command), cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True
    )
    seen = set()
    try:
        while pod.poll() is None:
            seen |= listening(tree(pod.pid))
            time.sleep(0.05)
    finally:
        pod.kill()
        pod.wait()
    assert pod.returncode == 0
    assert seen and seen <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_files_have_the_rights_that_the_user_gives_new_ones(tmp_path, tiny, monkeypatch):
    """Nothing that others may write, no more than the umask leaves."""
    monkeypatch.setattr(TorchEngine, "peak_flops", lambda engine: 1e12)
    umask = 0o027
    before = os.umask(umask)
    try:
        run(tiny(f"run.output={tmp_path / 'run'}", "run.steps=4"))
    finally:
        os.umask(before)
    made = list(tmp_path.rglob("*"))
    assert {path.name for path in made} >= {
        "config.yaml",
        "metrics.jsonl",
        "checkpoints",
        "environment.json",
        "lock",
    }
    for path in made:
        rights = stat.S_IMODE(path.stat().st_mode)
        assert rights & umask == 0 and rights & 0o600 == 0o600, path


def pinned(text):
    """(package, version) of the lines that pin one."""
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;\\]+)", text, re.MULTILINE)
    return {(name.lower().replace("_", "-"), version) for name, version in found}


def test_the_lock_has_what_is_required_and_a_hash_of_every_file():
    required, locked = ((ROOT / f"requirements.{ending}").read_text() for ending in ("txt", "lock"))
    assert pinned(required) and pinned(required) <= pinned(locked)
    for entry in re.split(r"\n(?=[A-Za-z0-9])", locked):
        if "==" in entry.splitlines()[0]:
            assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry.splitlines()[0]

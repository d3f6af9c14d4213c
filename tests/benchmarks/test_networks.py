"""Emulated hosts: as slow as they say in both directions, nothing dropped, and nothing left of
them."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import distributed

from benchmarks import exchange, networks
from benchmarks.networks import FRAME, PAYLOAD, Network
from common.errors import ConfigError
from parallel.sparse import Sparse
from tests.conftest import ROOT

RATE = 8_000_000
SIZE = 250_000


@pytest.fixture
def root():
    if (
        os.geteuid()
        or subprocess.run(
            ["ip", "netns", "add", f"try{os.getpid()}"], capture_output=True
        ).returncode
    ):
        pytest.skip("needs root and network namespaces")
    subprocess.run(["ip", "netns", "del", f"try{os.getpid()}"], check=True)


def names():
    return subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout


def swap(rank, meet):
    """The fastest of three swaps (noise only ever adds time): seconds in which two ranks send each
    other SIZE bytes at once, and what went over the cable for that."""
    distributed.all_reduce(torch.zeros(1))
    sent = torch.full((SIZE,), rank, dtype=torch.uint8)
    received = torch.empty(SIZE, dtype=torch.uint8)
    found = []
    for _ in range(3):
        meet()
        before = networks.traffic()
        start = time.perf_counter()
        operations = [distributed.P2POp(distributed.irecv, received, 1 - rank)]
        operations.append(distributed.P2POp(distributed.isend, sent, 1 - rank))
        for work in distributed.batch_isend_irecv(operations):
            work.wait()
        seconds = time.perf_counter() - start
        assert (received == 1 - rank).all()
        meet()
        found.append((seconds, *(after - was for after, was in zip(networks.traffic(), before))))
    return min(found)


def fail(rank, meet):
    if rank:
        raise ValueError("a rank's own")
    meet()


@pytest.mark.netns
@pytest.mark.clock
@pytest.mark.multiprocess
def test_cables_are_as_slow_as_they_say_and_full_duplex_and_a_failed_rank_ends_the_others(root):
    """Frames take 250 ms x 1514 / 1448; the least is what a full bucket lets through, the most what
    processors add."""
    with Network(2, RATE) as network:
        results = [(RATE, *result) for result in networks.run(network, swap)]
        network.limit(1, RATE // 2)  # on one side of a swap
        results += [(RATE // 2, *result) for result in networks.run(network, swap)]
        assert network.dropped() == 0
        with pytest.raises(RuntimeError, match=r"rank 1: (.|\n)*a rank's own"):
            networks.run(network, fail)
    framed = SIZE * FRAME / PAYLOAD
    for rate, seconds, sent, received in results:
        assert 0.98 < seconds / (8 * framed / rate) < 1.5  # one after the other would be 2
        # Acknowledgements are a small frame for every other one at most.
        assert 1 < sent / framed < 1.06
        assert 1 < received / framed < 1.06
    assert f"hosts{os.getpid()}" not in names()


@pytest.mark.slow
@pytest.mark.netns
def test_nothing_is_left_after_a_signal(root):
    code = (
        "import time\nfrom benchmarks.networks import Network\n"
        "with Network(1, 1000000):\n    print('up', flush=True)\n    time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout.readline() == "up\n"
        assert names().count(f"hosts{process.pid}-") == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) != 0
        assert f"hosts{process.pid}-" not in names()


def test_without_root_or_tools_one_line_says_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(
        ConfigError, match="need network namespaces, which root alone may make; run as root"
    ):
        Network(2, RATE).__enter__()
    monkeypatch.setattr(networks.shutil, "which", lambda tool: None)
    with pytest.raises(ConfigError, match="need ip and tc of iproute2; install it"):
        Network(2, RATE).__enter__()


@pytest.mark.parametrize(
    ("digest", "kept", "fault"),
    [("a", 0, ""), ("b", 0, "ranks or rounds"), ("a", 2**-16, "put in")],
)
def test_results_are_checked(digest, kept, fault):
    """Two ranks that leave nothing out; a digest, or one number of what was kept, is another."""
    given = [exchange._whole(exchange.own_vector(rank)) for rank in range(2)]
    fine = exchange.Outcome([], ["a"], sum(given).float(), [])
    first = fine._replace(kept=[Sparse(torch.tensor([3]), torch.tensor([float(kept)]))])
    expected = (
        pytest.raises(RuntimeError, match=f"topk: .*{fault}") if fault else contextlib.nullcontext()
    )
    with expected:
        exchange.check([{"topk": first}, {"topk": fine._replace(digests=[digest])}])

"""Several hosts on this machine: network namespaces, each with one cable of limited rate to a switch that joins them.

Needs root, Linux, and iproute2's `ip` and `tc`. The machine's own interfaces are not touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Callable, List, Optional, Tuple

from torch import distributed

from benchmarks import ranks
from common.errors import ConfigError

FRAME, PAYLOAD = 1514, 1448  # bytes of a full Ethernet frame without its checksum, and of TCP's data in it
# Of a bucket that is full after a pause goes through at once: little more than a frame is the least that works.
_BURST = 1600  # bytes
# What waits for a cable is not dropped: TCP would take hundreds of milliseconds to see that and to begin again.
_QUEUE = 4 << 20  # bytes
_CABLE = "cable"
_PREFIX = "hosts"  # of a network's name, before the number of the process that made it
_ADDRESS = "10.84.0.{}"
_TCP = {
    "tcp_congestion_control": "reno",  # which every kernel has: the machine's own choice is not what is measured
    # Else a connection that has paused begins with ten packets, a third of a message, and waits for word of these.
    "tcp_slow_start_after_idle": "0",
}
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_PATIENCE = 300.0  # seconds


class Network:
    """`hosts` hosts with full-duplex cables of `rate` bits a second to a switch; there while in its context.

    A token bucket limits what leaves the host and another what leaves the switch for it, frames and their headers
    included. The kernel's delay is the only one.

    Raises:
        ConfigError: on entering, where hosts cannot be made here.
    """

    def __init__(self, hosts: int, rate: int):
        self.hosts, self.rate = hosts, rate
        prefix = f"{_PREFIX}{os.getpid()}"
        self._switch, self._names = f"{prefix}-switch", [f"{prefix}-{number}" for number in range(hosts)]

    def __enter__(self) -> Network:
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            raise ConfigError(f"emulated hosts need {' and '.join(missing)} of iproute2; install it")
        if os.geteuid():
            raise ConfigError("emulated hosts need network namespaces, which root alone may make; run as root")
        _remove_leftovers()
        with contextlib.ExitStack() as stack:
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _exit))
            stack.callback(self._remove)
            self._build()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def enter(self, host: int) -> None:
        """Moves this thread, and what it starts, to a host; for good."""
        with open(f"/var/run/netns/{self._names[host]}", "rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "setns")

    def within(self, host: int) -> Tuple[str, ...]:
        """What runs a command on a host."""
        return (shutil.which("ip") or "ip", "netns", "exec", self._names[host])

    def address(self, host: int) -> str:
        return _ADDRESS.format(host + 1)

    def connect(self, host: int, connected: bool) -> None:
        """Plug in a host's cable, or pull it out: packets vanish, and nobody is told."""
        _call("ip", "-n", self._switch, "link", "set", f"port{host}", "up" if connected else "down")

    def limit(self, host: int, rate: int) -> None:
        """Give a host's cable another rate, in bits a second, in both directions."""
        for namespace, device in ((self._switch, f"port{host}"), (self._names[host], _CABLE)):
            _call("tc", "-n", namespace, "qdisc", "change", "dev", device, *_bucket(rate).split())

    def dropped(self) -> int:
        """Packets that queues have dropped since the network was made."""
        shown = (_call("tc", "-n", name, "-s", "-j", "qdisc", "show") for name in (self._switch, *self._names))
        return sum(queue["drops"] for text in shown for queue in json.loads(text))

    def _build(self) -> None:
        _batch("ip", [f"netns add {name}" for name in (self._switch, *self._names)])
        limit = _bucket(self.rate)
        wiring = ["link add bridge type bridge stp_state 0 forward_delay 0", "link set bridge up"]
        for number, name in enumerate(self._names):
            wiring += [
                f"link add port{number} type veth peer name {_CABLE} netns {name}",
                f"link set port{number} master bridge up",
            ]
        _batch("ip", wiring, self._switch)
        _batch("tc", [f"qdisc add dev port{number} {limit}" for number in range(self.hosts)], self._switch)
        for number, name in enumerate(self._names):
            address = f"addr add {_ADDRESS.format(number + 1)}/24 dev {_CABLE}"
            _batch("ip", [address, "link set lo up", f"link set {_CABLE} up"], name)
            _batch("tc", [f"qdisc add dev {_CABLE} {limit}"], name)

    def _remove(self) -> None:
        # A second signal would leave the rest behind.
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        for name in (*self._names, self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        for number, handler in before.items():
            signal.signal(number, handler)


def run(network: Network, function: Callable, *args: Any, connect: bool = True) -> List[Any]:
    """Call function(rank, meet, *args) in a process on each host; return the results by rank.

    The processes are forked from this one, so that what it has imported costs nothing. meet() returns once all ranks
    have called it, and sends nothing over the network.

    Args:
        connect: join the processes by gloo over their cables. False leaves that to the function; the environment is
            torchrun's with a rank on each host.

    Raises:
        RuntimeError: a rank failed or died; the others are killed before.
    """
    barrier = multiprocessing.Barrier(network.hosts, timeout=_PATIENCE)
    with tempfile.TemporaryDirectory() as folder:
        prepare = functools.partial(_join, network, f"{folder}/store" if connect else None)
        return ranks.results_of("fork", network.hosts, prepare, _meeting, barrier.wait, function, args)


def _meeting(rank: int, meet: Callable[[], object], function: Callable, args: tuple) -> Any:
    result = function(rank, meet, *args)
    meet()  # none leaves while others still need it
    return result


def _join(network: Network, store: Optional[str], rank: int) -> None:
    """Move this process to its host, and connect it with the others if there is a store."""
    network.enter(rank)
    for name, value in _TCP.items():
        Path("/proc/sys/net/ipv4", name).write_text(value, encoding="ascii")
    os.environ["GLOO_SOCKET_IFNAME"] = _CABLE
    if store is None:
        os.environ.update(MASTER_ADDR=_ADDRESS.format(1), MASTER_PORT="29500", RANK=str(rank), LOCAL_RANK="0")
        os.environ.update(WORLD_SIZE=str(network.hosts), LOCAL_WORLD_SIZE="1")
        return
    shared, patience = distributed.FileStore(store, network.hosts), datetime.timedelta(seconds=_PATIENCE)
    distributed.init_process_group("gloo", store=shared, rank=rank, world_size=network.hosts, timeout=patience)


def traffic() -> Tuple[int, int]:
    """Bytes that this host has sent and received over its cable, frames' headers included."""
    with open("/proc/thread-self/net/dev", encoding="ascii") as stream:
        fields = next(line for line in stream if line.strip().startswith(f"{_CABLE}:")).split()
    return int(fields[9]), int(fields[1])


def processors() -> Tuple[int, int]:
    """Ticks in which this machine's processors were idle, and all ticks, since it was started."""
    with open("/proc/stat", encoding="ascii") as stream:
        ticks = [int(text) for text in stream.readline().split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def _bucket(rate: int) -> str:
    return f"root tbf rate {rate}bit burst {_BURST} limit {_QUEUE}"


def _remove_leftovers() -> None:
    """Networks of processes that were killed before they could remove them."""
    for line in _call("ip", "netns", "list").splitlines():
        name = line.split()[0]
        owner = name[len(_PREFIX) :].partition("-")[0]
        if name.startswith(_PREFIX) and owner.isdecimal() and not os.path.exists(f"/proc/{owner}"):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _batch(tool: str, commands: List[str], namespace: str = "") -> None:
    _call(tool, *(("-n", namespace) if namespace else ()), "-batch", "-", given="\n".join(commands))


def _call(*command: str, given: str = "") -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        raise ConfigError(f"emulated hosts: {command[0]}: {reason[0]}; the kernel needs namespaces, veth and tbf")
    return done.stdout

"""Several hosts on this machine: network namespaces, each with one cable of limited rate to a
switch that joins them.

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
from types import FrameType
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

from torch import distributed

from benchmarks import ranks
from common.errors import ConfigError

FRAME = 1514  # bytes of a full Ethernet frame without its checksum
PAYLOAD = 1448  # bytes of TCP's data in it
# Bytes. A full bucket goes through at once after a pause: little more than a frame is the least
# that works.
_BURST = 1600
# Bytes. What waits for a cable is not dropped: TCP would take hundreds of milliseconds to see that
# and to begin again.
_QUEUE = 4 << 20
_CABLE = "cable"
_PREFIX = "hosts"  # of a network's name, before the number of the process that made it
_ADDRESS = "10.84.0.{}"
_TCP = {
    # Every kernel has it: the machine's own choice is not what is measured.
    "tcp_congestion_control": "reno",
    # Else a connection that has paused begins with ten packets, a third of a message, and waits for
    # word of these.
    "tcp_slow_start_after_idle": "0",
}
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_PATIENCE = 300.0  # seconds


class Traffic(NamedTuple):
    """Bytes that a host has sent and received over its cable, frames' headers included."""

    sent: int
    received: int


class Ticks(NamedTuple):
    """Ticks of all processors since the machine was started: those in which they were idle, and
    all.
    """

    idle: int
    total: int


class Network:
    """Hosts with a full-duplex cable each to a switch; there while in its context.

    A token bucket limits what leaves the host and another what leaves the switch for it, frames and
    their headers included. The kernel's delay is the only one.

    hosts: how many there are.
    rate: of each cable as it was made, in bits a second.
    """

    def __init__(self, hosts: int, rate: int):
        """
        Args:
            hosts: how many there are.
            rate: of each cable, in bits a second.
        """
        self.hosts = hosts
        self.rate = rate
        prefix = f"{_PREFIX}{os.getpid()}"
        self._switch = f"{prefix}-switch"
        self._names = [f"{prefix}-{number}" for number in range(hosts)]

    def __enter__(self) -> Network:
        """Make the hosts.

        Raises:
            ConfigError: hosts cannot be made here.
        """
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            tools = " and ".join(missing)
            raise ConfigError(f"emulated hosts need {tools} of iproute2; install it")
        if os.geteuid():
            raise ConfigError(
                "emulated hosts need network namespaces, which root alone may make; run as root"
            )
        _remove_leftovers()
        with contextlib.ExitStack() as stack:
            # By default SIGTERM ends a process at once, without what its contexts do at their end.
            before = signal.signal(signal.SIGTERM, _exit)
            stack.callback(signal.signal, signal.SIGTERM, before)
            # Before there is anything to remove: an error may leave half of a network.
            stack.callback(self._remove)
            self._build()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def enter(self, host: int) -> None:
        """Move this thread, and what it starts, to a host; for good.

        Args:
            host: its number, from 0.

        Raises:
            OSError: the kernel refuses.
        """
        with open(f"/var/run/netns/{self._names[host]}", "rb") as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "setns")

    def within(self, host: int) -> Tuple[str, ...]:
        """Return the words that, before those of a command, run it on a host.

        Args:
            host: its number, from 0.
        """
        ip = shutil.which("ip") or "ip"
        return (ip, "netns", "exec", self._names[host])

    def address(self, host: int) -> str:
        """Return the IPv4 address of a host.

        Args:
            host: its number, from 0.
        """
        return _ADDRESS.format(host + 1)

    def connect(self, host: int, connected: bool) -> None:
        """Plug in a host's cable, or pull it out: packets vanish, and nobody is told.

        Args:
            host: its number, from 0.
            connected: whether to plug it in.
        """
        state = "up" if connected else "down"
        _call(f"ip -n {self._switch} link set port{host} {state}")

    def limit(self, host: int, rate: int) -> None:
        """Give a host's cable another rate in both directions.

        Args:
            host: its number, from 0.
            rate: in bits a second.
        """
        bucket = _bucket(rate)
        _call(f"tc -n {self._switch} qdisc change dev port{host} {bucket}")
        _call(f"tc -n {self._names[host]} qdisc change dev {_CABLE} {bucket}")

    def dropped(self) -> int:
        """Return how many packets queues have dropped since the network was made."""
        drops = 0
        for name in (self._switch, *self._names):
            queues = json.loads(_call(f"tc -n {name} -s -j qdisc show"))
            drops += sum(queue["drops"] for queue in queues)
        return drops

    def _build(self) -> None:
        """Make namespaces, the bridge that is the switch, and the cables."""
        _batch("ip", [f"netns add {name}" for name in (self._switch, *self._names)])
        # Without a spanning tree and its delays the bridge forwards frames at once.
        wiring = [
            "link add bridge type bridge stp_state 0 forward_delay 0",
            "link set bridge up",
        ]
        for number, name in enumerate(self._names):
            wiring.append(f"link add port{number} type veth peer name {_CABLE} netns {name}")
            wiring.append(f"link set port{number} master bridge up")
        _batch("ip", wiring, self._switch)
        # One bucket at each end of a cable, as each limits only what is sent there.
        bucket = _bucket(self.rate)
        ports = [f"qdisc add dev port{number} {bucket}" for number in range(self.hosts)]
        _batch("tc", ports, self._switch)
        for number, name in enumerate(self._names):
            commands = [
                f"addr add {self.address(number)}/24 dev {_CABLE}",
                "link set lo up",
                f"link set {_CABLE} up",
            ]
            _batch("ip", commands, name)
            _batch("tc", [f"qdisc add dev {_CABLE} {bucket}"], name)

    def _remove(self) -> None:
        """Remove whatever there is of the network."""
        # A second signal would leave the rest behind.
        before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, signal.SIG_IGN)
        for name in (*self._names, self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        for number, handler in before.items():
            signal.signal(number, handler)


def run(network: Network, function: Callable, *args: Any, connect: bool = True) -> List[Any]:
    """Call function(rank, meet, *args) in a process on each host; return the results by rank.

    The processes are forked from this one, so that what it has imported costs nothing. meet()
    returns once all ranks have called it, and sends nothing over the network.

    Args:
        network: of the hosts, one for each rank.
        function: that is called.
        args: its further arguments.
        connect: join the processes by gloo over their cables. False leaves that to the function;
            the environment is torchrun's with a rank on each host.

    Raises:
        RuntimeError: a rank failed or died; the others are killed before.
    """
    barrier = multiprocessing.Barrier(network.hosts, timeout=_PATIENCE)
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store" if connect else None
        prepare = functools.partial(_join, network, store)
        call = functools.partial(_call_and_meet, barrier.wait, function, args)
        return ranks.results_of("fork", network.hosts, prepare, call)


def _call_and_meet(meet: Callable[[], object], function: Callable, args: tuple, rank: int) -> Any:
    """Return what the function returns, once all ranks have its results."""
    result = function(rank, meet, *args)
    meet()  # none leaves while others still need it
    return result


def _join(network: Network, store: Optional[str], rank: int) -> None:
    """Move this process to its host, and connect it with the others if there is a store."""
    # Of the host alone: each namespace has settings of its own.
    network.enter(rank)
    for name, value in _TCP.items():
        Path("/proc/sys/net/ipv4", name).write_text(value, encoding="ascii")
    os.environ["GLOO_SOCKET_IFNAME"] = _CABLE
    if store is None:
        os.environ.update(
            MASTER_ADDR=network.address(0),
            MASTER_PORT="29500",
            RANK=str(rank),
            LOCAL_RANK="0",
            WORLD_SIZE=str(network.hosts),
            LOCAL_WORLD_SIZE="1",
        )
        return
    # By a file, so that meeting sends nothing over the cables.
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(store, network.hosts),
        rank=rank,
        world_size=network.hosts,
        timeout=datetime.timedelta(seconds=_PATIENCE),
    )


def traffic() -> Traffic:
    """Return the traffic of the host on which this thread runs."""
    with open("/proc/thread-self/net/dev", encoding="ascii") as stream:
        line = next(line for line in stream if line.strip().startswith(f"{_CABLE}:"))
    # The name, eight columns of what was received, and eight of what was sent; bytes come first.
    fields = line.split()
    return Traffic(sent=int(fields[9]), received=int(fields[1]))


def processors() -> Ticks:
    """Return the ticks of this machine's processors."""
    with open("/proc/stat", encoding="ascii") as stream:
        fields = stream.readline().split()
    # Those of guests, the last two columns, are counted among a user's already.
    ticks = [int(field) for field in fields[1:9]]
    idle = ticks[3]
    waiting_for_disks = ticks[4]
    return Ticks(idle + waiting_for_disks, sum(ticks))


def _bucket(rate: int) -> str:
    """Return the words of `tc` for a token bucket of so many bits a second."""
    return f"root tbf rate {rate}bit burst {_BURST} limit {_QUEUE}"


def _remove_leftovers() -> None:
    """Remove the networks of processes that were killed before they could do so."""
    for line in _call("ip netns list").splitlines():
        name = line.split()[0]
        if not name.startswith(_PREFIX):
            continue
        owner = name[len(_PREFIX) :].partition("-")[0]
        if owner.isdecimal() and not os.path.exists(f"/proc/{owner}"):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _exit(number: int, _: Optional[FrameType]) -> None:
    """Handle a signal: end the process by an exception, with the exit code that shells give."""
    raise SystemExit(128 + number)


def _batch(tool: str, commands: List[str], namespace: str = "") -> None:
    """Let `ip` or `tc` run several commands, in a namespace if one is named."""
    option = f"-n {namespace}" if namespace else ""
    _call(f"{tool} {option} -batch -", given="\n".join(commands))


def _call(command: str, given: str = "") -> str:
    """Run a command of words without spaces; return its output.

    Raises:
        ConfigError: it failed.
    """
    words = command.split()
    done = subprocess.run(words, input=given, capture_output=True, text=True)
    if done.returncode:
        output = (done.stderr or done.stdout).strip()
        reason = output.splitlines()[0] if output else "no reason given"
        raise ConfigError(
            f"emulated hosts: {words[0]}: {reason}; the kernel needs namespaces, veth and tbf"
        )
    return done.stdout

"""Which hosts take part in a run, and how one finds the master: from options or from SLURM.

Loads no torch.

Runs on Python 3.8, as all that starts a run on IPUs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import List, Mapping, Optional, Tuple

from common.errors import UserError

NAME_SECONDS = 45.0  # for a name server to know the master, and by its present address
_PORT = 29500
_SLURM_PORTS = range(20000, 30000)  # below the ports that systems give out for outgoing connections
_SIOCGIFADDR = 0x8915  # of ioctl on Linux: the address of an interface
_AGAIN_SECONDS = 0.5  # between two attempts to listen


class HostLost(Exception):
    """A host, or the way to it, is gone or not there yet; says which.

    The input may be right, so that the same command may go on.
    """


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run; host 0 is the master, and listens.

    number: how many there are.
    this: number of this one.
    master: name or address of host 0.
    port: at which it listens; 0: any.
    """

    number: int = 1
    this: int = 0
    master: str = "127.0.0.1"
    port: int = 0

    @property
    def place(self) -> str:
        """Return HOST:PORT of the master."""
        host = f"[{self.master}]" if ":" in self.master else self.master
        return f"{host}:{self.port}"


def find(
    nnodes: Optional[int],
    node_rank: Optional[int],
    master: Optional[str],
    environment: Mapping[str, str] = os.environ,
) -> Hosts:
    """Return the hosts that the options name, or those of a SLURM step.

    Without options a task of a SLURM step runs on the hosts of the step.

    Args:
        nnodes, node_rank, master: values of the options --nnodes, --node-rank and --master; None
            where not given.
        environment: of this process.

    Raises:
        UserError: options that do not make a whole, or a SLURM step with more than a task per node.
    """
    if nnodes is None and node_rank is None and master is None:
        return _from_slurm(environment)
    if nnodes is None:
        raise UserError("--node-rank and --master go with --nnodes, the number of hosts")
    # One host needs no address that others could reach, whatever --master says.
    if nnodes == 1 and not node_rank:
        return Hosts()
    # Several hosts: each needs to know which one it is, and where the master listens.
    if node_rank is None or master is None:
        options = {"--node-rank": node_rank, "--master": master}
        missing = " and ".join(option for option, value in options.items() if value is None)
        raise UserError(
            f"--nnodes {nnodes} also needs {missing}, e.g. --node-rank 0 --master 10.0.0.1"
        )
    if not 0 <= node_rank < nnodes:
        raise UserError(
            f"--node-rank {node_rank} is none of 0 to {nnodes - 1}, which --nnodes {nnodes} has"
        )
    host, port = _host_and_port(master)
    return Hosts(nnodes, node_rank, host, port)


def _host_and_port(text: str) -> Tuple[str, int]:
    """Return the parts of HOST, HOST:PORT or [ADDRESS]:PORT. Raises UserError."""
    host, colon, port = text.rpartition(":")
    # There is no port; an IPv6 address in brackets has colons of its own.
    if not colon or text.endswith("]"):
        host = text
        port = str(_PORT)
    elif ":" in host and not host.startswith("["):
        raise UserError(
            f"--master {text}: write an IPv6 address in brackets, e.g. [fd00::1]:{_PORT}"
        )
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(
            f"--master {text} is not HOST or HOST:PORT with a port from 1 to 65535, e.g. 10.0.0.1:{_PORT}"
        )
    return host.strip("[]"), int(port)


def _from_slurm(environment: Mapping[str, str]) -> Hosts:
    """Return the hosts of a SLURM step; one host outside of a step, as in a batch script.

    Raises UserError.
    """
    nodes = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES", "1")
    # A batch script has the variables of its job, too, but is a process by itself.
    if "SLURM_STEP_ID" not in environment or not nodes.isdecimal() or int(nodes) < 2:
        return Hosts()
    # Each task starts all ranks of its node: a second one would start them again.
    tasks = environment.get("SLURM_STEP_NUM_TASKS", nodes)
    if tasks != nodes:
        raise UserError(
            f"SLURM started {tasks} tasks on {nodes} nodes; start one each: srun --ntasks-per-node=1"
        )
    names = _slurm_names(environment)
    this = environment.get("SLURM_NODEID", "")
    if len(names) != int(nodes) or not this.isdecimal() or int(this) >= int(nodes):
        raise UserError(
            f"SLURM names {len(names)} hosts for {nodes} nodes, and this one {this!r}; "
            "give --nnodes, --node-rank and --master"
        )
    # A port that all hosts know, and that two jobs rarely share.
    job = environment.get("SLURM_JOB_ID", "0")
    number = int(job) if job.isdecimal() else 0
    port = _SLURM_PORTS[number % len(_SLURM_PORTS)]
    return Hosts(int(nodes), int(this), names[0], port)


def _slurm_names(environment: Mapping[str, str]) -> List[str]:
    """Return the names of the hosts of a SLURM step, in order. Raises UserError."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    # Only SLURM knows how its lists of nodes expand, such as node[01-04,7].
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        output = subprocess.check_output(command, stderr=subprocess.PIPE, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(
            f"scontrol cannot expand the nodes {nodes!r} of the SLURM step ({error}); "
            "give --nnodes, --node-rank and --master"
        ) from None
    return output.split()


def listen(hosts: Hosts) -> socket.socket:
    """Return a socket that listens on the master, bound to the master's address of `hosts` only.

    A scheduler may start a host before its name is known, so that is waited for.

    Raises:
        UserError: the port is taken, or the address is not this host's or the loopback, though
            others must reach it.
        HostLost: the name is unknown for `NAME_SECONDS`, or is that of another host.
    """
    end = time.monotonic() + NAME_SECONDS
    while True:
        try:
            return _listen_at_once(hosts)
        except HostLost:
            if time.monotonic() > end:
                raise
        time.sleep(_AGAIN_SECONDS)


def _listen_at_once(hosts: Hosts) -> socket.socket:
    """Return a socket that listens on the master; see `listen`, which waits for its name."""
    # The address of the name, which others must be able to reach.
    remedy = "give a name or an address that exists"
    try:
        places = socket.getaddrinfo(hosts.master, hosts.port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise UserError(f"--master {hosts.master}: is no name of a host; {remedy}") from None
    except OSError as error:
        raise HostLost(f"--master {hosts.master}: {error.strerror or error}; {remedy}") from None
    family, _, _, _, place = places[0]
    address = str(place[0])  # a text in both families of addresses that have ports
    is_loopback = address == "::1" or address.startswith("127.")
    if is_loopback and hosts.number > 1 and hosts.master not in ("localhost", address):
        raise UserError(
            f"--master {hosts.master} is {address} on this host itself, "
            "which others cannot reach (see /etc/hosts); "
            "give the address of its network interface"
        )
    try:
        # Bound to this address alone: other networks of the host do not reach it.
        return socket.create_server((address, hosts.port), family=family, backlog=1024)
    except OSError as error:
        assert error.errno is not None, error  # it comes from the system
        text = (
            f"cannot listen at {hosts.place}: {os.strerror(error.errno)}; "
            "give an address of --node-rank 0 and a free port to --master on every host"
        )
        # A name server may still give the address of an earlier host of this name.
        if error.errno == errno.EADDRNOTAVAIL and hosts.master != address:
            raise HostLost(text) from None
        raise UserError(text) from None


def interface_towards(address: str) -> Optional[str]:
    """Return the name of the network interface by which this host reaches `address`.

    Standard libraries do not tell: the route is asked of an unsent datagram's socket, and the
    interface that has its address of /proc for IPv6, and for IPv4 of an ioctl that Linux alone
    numbers so. Tried on Linux 6.

    Returns:
        The name; None if that is unknown, as on other systems.
    """
    if sys.platform != "linux":
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        name, *_ = probe.getsockname()
        packed = socket.inet_pton(family, name.partition("%")[0])
        if family == socket.AF_INET6:
            return _ipv6_interface(packed)
        return _ipv4_interface(packed, probe)
    return None


def _ipv6_interface(address: bytes) -> Optional[str]:
    """Return the name of the interface with this address; None without one."""
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        digits, *_, name = line.split()
        if bytes.fromhex(digits) == address:
            return name
    return None


def _ipv4_interface(address: bytes, probe: socket.socket) -> Optional[str]:
    """Return the name of the interface with this address, asked for through any IPv4 socket.

    None without one.
    """
    import fcntl

    for _, name in socket.if_nameindex():
        # A struct ifreq, of which the address begins at byte 20.
        request = struct.pack("256s", name.encode())
        # An interface without an address is an error.
        with contextlib.suppress(OSError):
            if fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24] == address:
                return name
    return None

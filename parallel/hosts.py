"""Which hosts take part in a run, and how one finds the master: from options or from SLURM. Loads no torch.

Runs on Python 3.8, as all that starts a run on IPUs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, Optional

from recipe.errors import UserError

_PORT = 29500
_SLURM_PORTS = range(20000, 30000)  # below the ports that systems give out for outgoing connections


@dataclass(frozen=True)
class Hosts:
    """`number` hosts, of which this is number `this`; host 0 is the master and listens at `master`:`port` (0: any)."""

    number: int = 1
    this: int = 0
    master: str = "127.0.0.1"
    port: int = 0

    @property
    def place(self) -> str:
        """HOST:PORT of the master."""
        return f"[{self.master}]:{self.port}" if ":" in self.master else f"{self.master}:{self.port}"


def find(
    nnodes: Optional[int], node_rank: Optional[int], master: Optional[str], environment: Mapping[str, str] = os.environ
) -> Hosts:
    """The hosts that the options name; without any, those of the SLURM step that this process is a task of.

    Raises UserError: options that do not make a whole, or a SLURM step with more than a task per node.
    """
    if nnodes is None and node_rank is None and master is None:
        return _of_slurm(environment)
    if nnodes is None:
        raise UserError("--node-rank and --master go with --nnodes, the number of hosts")
    if nnodes == 1 and not node_rank:
        return Hosts()
    missing = [name for name, value in (("--node-rank", node_rank), ("--master", master)) if value is None]
    if missing:
        raise UserError(f"--nnodes {nnodes} also needs {' and '.join(missing)}, e.g. --node-rank 0 --master 10.0.0.1")
    if not 0 <= node_rank < nnodes:
        raise UserError(f"--node-rank {node_rank} is none of 0 to {nnodes - 1}, which --nnodes {nnodes} has")
    return Hosts(nnodes, node_rank, *_host_and_port(master))


def _host_and_port(text: str) -> tuple:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(_PORT)
    elif ":" in host and not host.startswith("["):
        raise UserError(f"--master {text}: write an IPv6 address in brackets, e.g. [fd00::1]:{_PORT}")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"--master {text} is not HOST or HOST:PORT with a port from 1 to 65535, e.g. 10.0.0.1:{_PORT}")
    return host.strip("[]"), int(port)


def _of_slurm(environment: Mapping[str, str]) -> Hosts:
    """The hosts of a SLURM step; one host outside of a step, as in a batch script."""
    nodes = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES", "1")
    if "SLURM_STEP_ID" not in environment or not nodes.isdecimal() or int(nodes) < 2:
        return Hosts()
    tasks, remedy = environment.get("SLURM_STEP_NUM_TASKS", nodes), "give --nnodes, --node-rank and --master"
    if tasks != nodes:
        raise UserError(f"SLURM started {tasks} tasks on {nodes} nodes; start one each: srun --ntasks-per-node=1")
    listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    command = ["scontrol", "show", "hostnames", listed]
    try:
        names = subprocess.check_output(command, stderr=subprocess.PIPE, text=True).split()
    except (OSError, subprocess.CalledProcessError) as error:
        fault = f"scontrol cannot expand the nodes {listed!r} of the SLURM step ({error})"
        raise UserError(f"{fault}; {remedy}") from None
    this, job = environment.get("SLURM_NODEID", ""), environment.get("SLURM_JOB_ID", "0")
    if len(names) != int(nodes) or not this.isdecimal() or int(this) >= int(nodes):
        raise UserError(f"SLURM names {len(names)} hosts for {nodes} nodes, and this one {this!r}; {remedy}")
    port = _SLURM_PORTS[(int(job) if job.isdecimal() else 0) % len(_SLURM_PORTS)]
    return Hosts(int(nodes), int(this), names[0], port)


def listen(hosts: Hosts) -> socket.socket:
    """A socket on the master, bound to the master's address only.

    Raises UserError: the port is taken, or the address is not this host's or the loopback, though others must reach it.
    """
    try:
        family, _, _, _, (address, *_) = socket.getaddrinfo(hosts.master, hosts.port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        fault = getattr(error, "strerror", None) or "is no name of a host"
        raise UserError(f"--master {hosts.master}: {fault}; give a name or an address that exists") from None
    loopback = address == "::1" or address.startswith("127.")
    if loopback and hosts.number > 1 and hosts.master not in ("localhost", address):
        raise UserError(
            f"--master {hosts.master} is {address} on this host itself, which others cannot reach (see /etc/hosts); "
            "give the address of its network interface"
        )
    try:
        return socket.create_server((address, hosts.port), family=family, backlog=1024)
    except OSError as error:
        remedy = "give an address of --node-rank 0 and a free port to --master on every host"
        raise UserError(f"cannot listen at {hosts.place}: {os.strerror(error.errno)}; {remedy}") from None


def interface_towards(address: str) -> Optional[str]:
    """Name of the network interface whose address this host uses to speak with `address`; None if that is unknown."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if sys.platform != "linux":
        return None
    import fcntl

    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own = socket.inet_pton(family, probe.getsockname()[0].partition("%")[0])
        if family == socket.AF_INET6:
            lines = map(str.split, Path("/proc/net/if_inet6").read_text().splitlines())
            return next((name for digits, *_, name in lines if bytes.fromhex(digits) == own), None)
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                if fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))[20:24] == own:  # SIOCGIFADDR
                    return name
    return None

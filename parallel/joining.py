"""How the ranks of a run find each other, and initialise torch.distributed."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from datetime import timedelta
from typing import List, NamedTuple, Tuple

import torch
import torch.distributed as dist

from common import timers
from common.errors import ConfigError, MachineError
from parallel import launchers
from parallel.generations import Store
from parallel.topology import Topology

RENDEZVOUS_SECONDS = 50.0  # for all ranks to find the master
# A rank may save, evaluate or compile while the others wait for it.
COLLECTIVE_TIMEOUT = timedelta(hours=1)
_SILENT_SECONDS = 10.0  # until a rank says whom it waits for
_NAMED = 8  # ranks that such a line names at most
_STAGES = "stages/"  # of a rank's key in the store by which all meet


class _Place(NamedTuple):
    """Where the ranks meet.

    Prefix: of their keys in the store, another for each attempt and generation.
    """

    host: str
    port: int
    prefix: str


def join(topology: Topology, device: torch.device, generation: int) -> None:
    """Initialise torch.distributed, with the time limits and the messages of this program.

    Every rank calls.

    Args:
        topology: of this process.
        device: of its tensors.
        generation: of an elastic run; 0 in others.

    Raises:
        ConfigError: the master's address is missing, the ranks do not meet in time, or their
            recipes differ.
        MachineError: the ranks do not meet in time though our launcher has started them.
    """
    # Wait for all ranks, and see that they belong together.
    place = _place(generation)
    try:
        store, stages = _meet(topology, place)
    except (OSError, RuntimeError) as error:
        # Torch's messages have lines of C++ below the first.
        reason = getattr(error, "strerror", None) or str(error).strip().splitlines()[0]
        fault = (
            f"{topology.describe()} did not meet all {topology.world} ranks "
            f"at {place.host}:{place.port} within {RENDEZVOUS_SECONDS:.0f} s ({reason})"
        )
        # Our launcher has started all, and gave the address: a host or the way to it is at fault.
        if launchers.is_ours(os.environ):
            raise MachineError(f"{fault}; rerun to resume") from None
        raise ConfigError(
            f"{fault}; check that all were started and that the address is right"
        ) from None
    _check_stages(stages, prints=topology.is_main)
    # Gloo serves tensors of the CPU everywhere, NCCL those of a GPU.
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Groups are formed by the store, also while another rank still compiles or saves.
    store.set_timeout(COLLECTIVE_TIMEOUT)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl",
        store=store,
        rank=topology.rank,
        world_size=topology.world,
        timeout=COLLECTIVE_TIMEOUT,
    )


def connect(host: str, port: int, timeout: timedelta) -> Store:
    """Return a further connection to the store at `host`:`port`, which listens.

    Its calls wait for `timeout`.
    """
    # Torch's types leave out `append`, which its stores have.
    return _connection(host, port, timeout)  # type: ignore[return-value]


def _connection(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)


def _place(generation: int) -> _Place:
    """Return where the ranks meet, from the launcher's environment. Raises ConfigError."""
    host = os.environ.get("MASTER_ADDR")
    port = os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise ConfigError(
            "MASTER_ADDR and MASTER_PORT must name the host and a free port where the ranks meet; "
            "start by ./run_pod.sh, or set them"
        )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return _Place(host, int(port), prefix=f"ranks/{attempt}/{generation}")


def _check_stages(stages: List[int], prints: bool) -> None:
    """Check that all ranks have as many stages.

    Others would form other groups, and wait for each other.

    Args:
        stages: of each rank.
        prints: whether this rank's error has a message.

    Raises:
        ConfigError: they differ.
    """
    for rank, number in enumerate(stages):
        if number != stages[0]:
            fault = f"rank {rank} has parallel.stages {number}, rank 0 {stages[0]}; give all hosts the same recipe"
            raise ConfigError(fault if prints else "")


def _meet(topology: Topology, place: _Place) -> Tuple[dist.Store, List[int]]:
    """Wait for all ranks.

    Returns:
        The store that all have reached, and `parallel.stages` of each.

    Raises:
        OSError, RuntimeError: they do not come in time.
    """
    from torch.distributed.elastic.utils.store import synchronize

    end = time.monotonic() + RENDEZVOUS_SECONDS
    # While this rank waits a thread says for whom.
    with timers.after(_SILENT_SECONDS, _say_who_is_missing, topology, place, end):
        # Every rank writes its number of stages, and reads those of all.
        store = dist.PrefixStore(place.prefix, _shared_store(topology, place, end))
        texts = synchronize(
            store,
            str(topology.stages).encode(),
            rank=topology.rank,
            world_size=topology.world,
            key_prefix=_STAGES,
            timeout=RENDEZVOUS_SECONDS,
        )
    return store, [int(text) for text in texts]


def _shared_store(topology: Topology, place: _Place, end: float) -> dist.TCPStore:
    """Return the store of all ranks, which the launcher serves, or else the main rank.

    Args:
        topology: of this process.
        place: of the store.
        end: time.monotonic() until which to wait for it.

    Raises:
        OSError, RuntimeError: nobody serves it in time.
    """
    serves = topology.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    # Torch's store would print each failed attempt to reach it at length.
    if not serves:
        _await_listener(place, end)
    return dist.TCPStore(
        place.host,
        place.port,
        is_master=serves,
        timeout=timedelta(seconds=RENDEZVOUS_SECONDS),
        wait_for_workers=False,
    )


def _await_listener(place: _Place, end: float) -> None:
    """Wait until somebody listens at the place.

    Args:
        place: of the store.
        end: time.monotonic() until which to wait.

    Raises:
        OSError: nobody did.
    """
    while True:
        try:
            socket.create_connection((place.host, place.port), timeout=1.0).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.2)


def _say_who_is_missing(topology: Topology, place: _Place, end: float) -> None:
    """Print whom this rank waits for, where, and until when.

    The main rank does so, and one that does not find the store.

    Called in a thread with a connection of its own, as the store's is taken by the wait.
    """
    left = end - time.monotonic()
    clock = time.strftime("%H:%M:%S", time.localtime(time.time() + left))
    where = f"at {place.host}:{place.port} until {clock}, for another {left:.0f} s"
    try:
        socket.create_connection((place.host, place.port), timeout=1.0).close()
    except OSError:
        _print(topology, f"waiting for rank 0 to listen {where}")
        return
    if not topology.is_main:
        return
    # If the store has ended the wait for it ends, too, and says why.
    with contextlib.suppress(RuntimeError):
        missing = _missing(topology.world, place)
        if missing:
            _print(topology, f"{_waiting_for(missing, topology.world)} {where}")


def _missing(world: int, place: _Place) -> List[int]:
    """Return the ranks that have not reached the store yet.

    Raises RuntimeError without a way to the store.
    """
    shared = _connection(place.host, place.port, timedelta(seconds=_SILENT_SECONDS))
    store = dist.PrefixStore(place.prefix, shared)
    return [rank for rank in range(world) if not store.check([f"{_STAGES}{rank}"])]


def _waiting_for(missing: List[int], world: int) -> str:
    """Return `3 of 4 ranks are here; waiting for rank 2`."""
    here = world - len(missing)
    are = "is" if here == 1 else "are"
    ranks = "rank" if len(missing) == 1 else "ranks"
    names = ", ".join(map(str, missing[:_NAMED]))
    if len(missing) > _NAMED:
        names += " ..."
    return f"{here} of {world} ranks {are} here; waiting for {ranks} {names}"


def _print(topology: Topology, text: str) -> None:
    """Print a line of this rank."""
    print(f"{topology.describe()}: {text}", file=sys.stderr, flush=True)

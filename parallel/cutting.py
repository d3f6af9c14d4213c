"""Ends the calls of torch.distributed that wait for ranks that are gone.

NCCL's communicators are aborted, gloo's connections are cut.

**Why connections are cut.** gloo has no way to end a call that waits: of its backend in torch 2.14
`abort` and `shutdown` return at once, and a receive goes on waiting until its time limit, an hour.
Nor does torch say which sockets gloo uses. So the process looks for its own TCP connections in
/proc/self/fd, which Linux alone has, and shuts them down: gloo's threads then find that the other
side has hung up, every waiting call ends within milliseconds with the error of a lost peer, and
`destroy_process_group` returns at once.

**What this relies on.** (1) Connections that were opened since the generation began, and until the
engine was there, are the generation's: gloo's, and one of the ranks' store. Whatever else opens one
meanwhile loses it when the generation ends. The mirror does (`training/mirror.py`), as it goes on
sending while processes regroup: an upload that is broken off so is begun once more at once. (2)
They are shut down, not closed: their descriptors stay gloo's, which closes them itself. A
descriptor is duplicated first, for Python's socket object closes what it is given. (3) Sockets that
listen stay as they are: if gloo's ends, gloo aborts the process. (4) Between the look and the
shutdown a connection may be closed, and its descriptor given to another one, which is then cut in
its place. That takes a thread that opens connections within microseconds, as the mirror's may; it
has not been seen.

Tried with torch 2.14.1 on Linux 6. If it broke, a replica that loses another would wait for an
hour, or end by SIGABRT: tests/training/test_elastic.py kills and stops replicas amid exchanges.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import Dict, Iterator, List, Protocol, Set, Tuple, runtime_checkable

import torch
import torch.distributed as dist

_ABORT_SECONDS = 10.0  # for NCCL to end what it does


@runtime_checkable
class _Communicator(Protocol):
    """NCCL's backend of a group; torch has a type of it only where it is built with NCCL."""

    def abort(self) -> None:
        """End all calls that wait."""


class Connections:
    """This process's TCP connections to the other ranks of a generation.

    Created before they are opened.
    """

    def __init__(self) -> None:
        self._before = set(_open_connections())
        self._own: Set[int] = set()  # empty until `note_open`

    def note_open(self) -> None:
        """Take note that all are open: connections that are opened from here on are others'."""
        self._own = set(_open_connections()) - self._before

    def cut(self) -> None:
        """Shut down the connections that are open."""
        connections = _open_connections()
        # Before `note_open` all that were opened since the beginning are the generation's.
        to_cut = self._own or set(connections) - self._before
        for inode, descriptor in connections.items():
            if inode in to_cut:
                with contextlib.suppress(OSError), _duplicate(descriptor) as connection:
                    connection.shutdown(socket.SHUT_RDWR)


def abort_nccl() -> None:
    """End all of this process's NCCL communicators.

    All at once, since a kernel of one may wait for that of another.

    Torch names neither the groups of a process nor their communicators in public: this uses
    `_world.pg_map` of torch.distributed.distributed_c10d, `_get_backend` of a group, which raises
    RuntimeError for one of gloo alone, and `abort` of NCCL's backend. Tried with torch 2.14.1. Were
    these names to change, an error would end the thread that waits for the end of a generation, and
    kernels would wait for ever.
    """
    if not torch.cuda.is_available() or not dist.is_initialized():
        return
    # The communicators of all groups but those of gloo alone.
    communicators: List[_Communicator] = []
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):
            communicator = group._get_backend(torch.device("cuda"))
            assert isinstance(communicator, _Communicator), communicator
            communicators.append(communicator)
    # Each abort waits in a thread of its own.
    threads = [
        threading.Thread(target=_abort, args=(communicator,), name="abort", daemon=True)
        for communicator in communicators
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_ABORT_SECONDS)


def _abort(communicator: _Communicator) -> None:
    """Abort a communicator, which another rank may have aborted before."""
    with contextlib.suppress(RuntimeError):
        communicator.abort()


def _open_connections() -> Dict[int, int]:
    """Return this process's TCP connections: inode -> descriptor.

    No other socket has the same inode meanwhile; a descriptor may be used again.
    """
    connections = {}
    for inode, descriptor in _open_sockets():
        # It may be closed by now; that is not ours to mind.
        with contextlib.suppress(OSError), _duplicate(descriptor) as duplicate:
            listens = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if duplicate.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                connections[inode] = descriptor
    return connections


def _open_sockets() -> Iterator[Tuple[int, int]]:
    """Yield inode and descriptor of each socket of this process.

    /proc names it `socket:[inode]`.
    """
    for name in os.listdir("/proc/self/fd"):
        try:
            kind, _, inode = os.readlink(f"/proc/self/fd/{name}").partition(":")
        except OSError:  # closed since
            continue
        if kind == "socket":
            yield int(inode.strip("[]")), int(name)


def _duplicate(descriptor: int) -> socket.socket:
    """Return a socket object of its own for a descriptor's socket. Raises OSError: it is closed."""
    return socket.socket(fileno=os.dup(descriptor))

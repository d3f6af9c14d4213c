"""This process in an elastic run: its place in each generation, and the end of one.

When a generation is over, whatever this process waits for ends at once with an error. NCCL's communicators are aborted.
gloo has no way to do that, so the connections are cut under it. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from datetime import timedelta
from typing import Callable, Dict, Iterator, Mapping, Set, Tuple

import torch
import torch.distributed as dist

from parallel.generations import LIFE, LeftOut, Member, Membership, Regroup, TooFew
from parallel.processes import is_lost_peer, leave
from parallel.topology import Topology
from recipe.config import Parallel
from recipe.errors import FAILED, LEFT_OUT, ConfigError

_STORE_LIMIT = timedelta(seconds=20)
_LISTEN_SECONDS = 0.1  # between two looks at the store, of up to 200 processes
_HEAR_SECONDS = 2.0  # in which the word that a generation is over follows a broken connection
_ABORT_SECONDS = 10.0  # for NCCL to end what it does
_OF_NCCL = {  # else torch's watchdog of NCCL ends this process with a lost one, and its signals reach later generations
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
_MEET_SECONDS = 10.0  # in which the processes of a generation connect on a busy host ...
_MEET_SECONDS_EACH = 0.03  # ... and more for each of them; up to a thousand less than the rendezvous allows


class Elastic:
    """The generations of a run as this process takes part in them."""

    def __init__(self, given: Topology, parallel: Parallel, identity: Mapping[str, str]):
        """If the run has begun without this replica, wait until it is taken in.

        Args: given: by the launcher. identity: what all replicas must have in common, by what it is.
        Raises ConfigError: this one has something else.
        """
        os.environ.update(_OF_NCCL)
        self._given, self._parallel = given, parallel
        self._place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        member = Member(given.replica, int(os.environ.get(LIFE, "0")))
        of_member = member, given.stage, given.stages, parallel.minimum, parallel.silence
        self._membership = Membership(self._client(), *of_member)
        self._heard = Membership(self._client(), *of_member)  # by a thread of its own
        for what, own in identity.items():
            if self._membership.common(f"{what}/{given.stage}", own) != own and member.life:
                fault = f"replica {given.replica} has other {what} than the run that it would join"
                raise ConfigError(f"{fault}; give its host the same files and overrides")
        if member.life:
            self._enter(self._membership.join)
        else:
            self._enter(lambda: self._membership.found(given.replicas))

    @property
    def number(self) -> int:
        """Of the generation, from 0."""
        return self._membership.number

    @property
    def topology(self) -> Topology:
        """This process among the members."""
        stages, members = self._given.stages, self._membership.members
        rank = members.index(self._membership.member) * stages + self._given.stage
        return Topology(len(members), stages, rank, self._given.local_rank)

    @property
    def replicas(self) -> Tuple[int, ...]:
        """The members' numbers, as the launcher gave them, in the order of their ranks."""
        return tuple(member.replica for member in self._membership.members)

    def begin(self) -> None:
        """Before the processes of this generation are connected: listen for its end."""
        self._over, self._done = threading.Event(), threading.Event()
        self._before: Set[int] = set(_connections())
        self._own: Set[int] = set()
        self._heard.number = self._membership.number
        task = {"target": self._listen, "args": (self._over, self._done), "name": "generation", "daemon": True}
        self._listener = threading.Thread(**task)
        self._listener.start()

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """While the processes of this generation connect, which notices no silence yet.

        All of a generation after the first were there when it was decided on: if they do not meet soon one of them has
        stopped since, and the generation is over.
        """
        timer = threading.Timer(_MEET_SECONDS + _MEET_SECONDS_EACH * self.topology.world, self.lost)
        timer.daemon = True
        if self.number:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def settled(self) -> None:
        """The engine is there: connections that are opened from here on are others'."""
        self._own = set(_connections()) - self._before

    def check(self) -> None:
        """Raises Regroup as soon as this generation is over."""
        if self._over.is_set():
            raise Regroup

    def wants(self) -> bool:
        """Whether a replica waits to be taken in."""
        return self._membership.is_wanted()

    def note_saved(self) -> None:
        """Let the launchers know that the run was asked to stop, and is saved."""
        self._membership.note_saved()

    def lost(self) -> None:
        """Another process is gone, or silent: this generation is over."""
        with contextlib.suppress(RuntimeError):  # of the store, which the listener finds, too
            self._membership.end()

    def explains(self, error: BaseException) -> bool:
        """Whether an error comes of the end of this generation; it may be the first to tell of that."""
        if isinstance(error, Regroup):
            return True
        if isinstance(error, Exception) and is_lost_peer(error):
            self._over.wait(_HEAR_SECONDS) or self.lost()
            self._over.wait(_HEAR_SECONDS)
        return self._over.is_set()

    def regroup(self, stopping: Callable[[], bool]) -> None:
        """Go on to the next generation, or end this process with a line.

        Args: stopping: whether the next one only has to save the run, for which fewer than parallel.minimum will do.
        """
        self.lost()
        self._over.wait(_HEAR_SECONDS)
        self.close()
        self._cut()
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            dist.destroy_process_group()
        self._enter(lambda: self._membership.follow(stopping))

    def close(self) -> None:
        """The run is done."""
        self._done.set()
        self._listener.join()

    def _listen(self, over: threading.Event, done: threading.Event) -> None:
        pause = _LISTEN_SECONDS * max(1.0, self.topology.world / 200)
        try:
            while not self._heard.is_over():
                if done.wait(pause):
                    return
            self._heard.say_alive()
        except RuntimeError:
            self._leave_without_store()
        over.set()
        _abort_nccl()
        self._cut_connections()
        # A process that was about to connect when it heard opens its connections only now: it would wait in vain.
        while not done.wait(_LISTEN_SECONDS):
            self._cut_connections()

    def _enter(self, generation: Callable[[], None]) -> None:
        """Take part in a generation, which the function waits for, or end this process with a line."""
        try:
            generation()
        except LeftOut:
            place = f"replica {self._given.replica}, stage {self._given.stage}"
            leave(f"{place}: the others went on without it; leaving", LEFT_OUT)
        except TooFew:
            fewer = f"fewer replicas are left than parallel.minimum {self._parallel.minimum}"
            leave(f"{fewer}; rerun to resume" if self._membership.member.replica == 0 else "")
        except RuntimeError:
            self._leave_without_store()

    def _leave_without_store(self) -> None:
        leave("the launcher of the first host is gone, or the way to it; rerun to resume", FAILED)

    def _cut(self) -> None:
        """End all calls in flight of this generation."""
        _abort_nccl()
        self._cut_connections()

    def _cut_connections(self) -> None:
        own = self._own or set(_connections()) - self._before
        for number, descriptor in _connections().items():
            if number in own:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)

    def _client(self) -> dist.Store:
        return dist.TCPStore(*self._place, None, False, _STORE_LIMIT, wait_for_workers=False)


def _abort_nccl() -> None:
    """End all of this process' NCCL communicators, together: a kernel of one may wait for that of another."""
    if not torch.cuda.is_available() or not dist.is_initialized():
        return
    found = []
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # groups of gloo alone
            found.append(group._get_backend(torch.device("cuda")))
    threads = [threading.Thread(target=_abort, args=(each,), name="abort", daemon=True) for each in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_ABORT_SECONDS)


def _abort(backend: dist.distributed_c10d.Backend) -> None:
    with contextlib.suppress(RuntimeError):
        backend.abort()


def _connections() -> Dict[int, int]:
    """This process' TCP sockets: their number in the system -> descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            kind, _, number = os.readlink(f"/proc/self/fd/{name}").partition(":")
            if kind == "socket":
                with socket.socket(fileno=os.dup(int(name))) as each:
                    listens = each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)  # gloo's must not end
                    if each.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                        found[int(number.strip("[]"))] = int(name)
    return found

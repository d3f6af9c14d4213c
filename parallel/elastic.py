"""This process in an elastic run: its place in each generation, and the end of one.

When a generation is over, whatever this process waits for ends at once with an error
(`parallel/cutting.py`). Linux only.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from datetime import timedelta
from typing import Callable, Iterator, Mapping, Tuple

import torch.distributed as dist

from common import timers
from common.errors import FAILED, LEFT_OUT, ConfigError
from parallel import cutting, ending, joining
from parallel.generations import LIFE, LeftOut, Member, Membership, Regroup, TooFew
from parallel.topology import Topology
from recipe.config import Parallel

_STORE_LIMIT = timedelta(seconds=20)
_LISTEN_SECONDS = 0.1  # between two looks at the store, of up to 200 processes
_HEAR_SECONDS = 2.0  # in which the word that a generation is over follows a broken connection
# Without these torch's watchdog of NCCL ends this process with a lost one, and its signals reach
# later generations.
_OF_NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
_MEET_SECONDS = 10.0  # in which the processes of a generation connect on a busy host ...
_MEET_SECONDS_EACH = 0.03  # ... and more for each; less than the rendezvous allows up to a thousand


class Elastic:
    """The generations of a run as this process takes part in them."""

    def __init__(self, given: Topology, parallel: Parallel, identity: Mapping[str, str]):
        """Join the run; if it has begun without this replica, wait until it is taken in.

        Args:
            given: topology that the launcher gave.
            parallel: section of the recipe.
            identity: what all replicas must have in common, by what it is.

        Raises:
            ConfigError: this one has something else.
        """
        # Before any group is formed: torch reads them as it does so.
        os.environ.update(_OF_NCCL)
        self._given = given
        self._minimum = parallel.minimum
        member = Member(given.replica, int(os.environ.get(LIFE, "0")))
        create_membership = functools.partial(
            Membership,
            member=member,
            stage=given.stage,
            stages=given.stages,
            minimum=parallel.minimum,
            silence=parallel.silence,
        )
        host = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        self._membership = create_membership(joining.connect(host, port, _STORE_LIMIT))
        # The listener's own: a connection to the store serves one thread.
        self._heard = create_membership(joining.connect(host, port, _STORE_LIMIT))
        # Before it enters: with other files it would train another model than the members.
        self._check_identity(identity)
        # A first life founds the run with all others; a later one waits to be taken in.
        if member.life:
            self._enter(self._membership.join)
        else:
            self._enter(lambda: self._membership.found(given.replicas))

    def _check_identity(self, identity: Mapping[str, str]) -> None:
        """Check that a replica that joins has what the first one had. Raises ConfigError."""
        member = self._membership.member
        for name, value in identity.items():
            common = self._membership.common(f"{name}/{self._given.stage}", value)
            if common != value and member.life:
                raise ConfigError(
                    f"replica {member.replica} has other {name} than the run that it would join; "
                    "give its host the same files and overrides"
                )

    @property
    def number(self) -> int:
        """Return the number of the generation, from 0."""
        return self._membership.number

    @property
    def topology(self) -> Topology:
        """Return the place of this process among the members."""
        stages = self._given.stages
        members = self._membership.members
        rank = members.index(self._membership.member) * stages + self._given.stage
        return Topology(len(members), stages, rank, self._given.local_rank)

    @property
    def replicas(self) -> Tuple[int, ...]:
        """Return the members' numbers, as the launcher gave them, in the order of their ranks."""
        return tuple(member.replica for member in self._membership.members)

    def begin(self) -> None:
        """Listen for the end of this generation, from before its processes are connected."""
        self._over = threading.Event()
        self._done = threading.Event()
        self._connections = cutting.Connections()
        # Only a number is needed to hear of a generation's end: its members are not looked at.
        self._heard.number = self._membership.number
        self._listener = threading.Thread(target=self._listen, name="generation", daemon=True)
        self._listener.start()

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """Limit the time in which the processes of this generation connect.

        No silence is noticed meanwhile.

        All of a generation after the first were there when it was decided on: if they do not meet
        soon one of them has stopped since, and the generation is over.
        """
        limit = _MEET_SECONDS + _MEET_SECONDS_EACH * self.topology.world
        with timers.after(limit, self.lost) if self.number else contextlib.nullcontext():
            yield

    def engine_is_built(self) -> None:
        """Take note that the engine is there: later connections are others'."""
        self._connections.note_open()

    def check(self) -> None:
        """Check that this generation goes on. Raises Regroup as soon as it is over."""
        if self._over.is_set():
            raise Regroup

    def wants(self) -> bool:
        """Return whether a replica waits to be taken in."""
        return self._membership.is_wanted()

    def note_saved(self) -> None:
        """Let the launchers know that the run was asked to stop, and is saved."""
        self._membership.note_saved()

    def lost(self) -> None:
        """End this generation, since another process is gone, or silent."""
        # If the store is gone the listener finds that, too.
        with contextlib.suppress(RuntimeError):
            self._membership.end()

    def explains(self, error: BaseException) -> bool:
        """Return whether an `error` comes of the end of this generation, of which it may tell first."""
        if isinstance(error, Regroup):
            return True
        # Who loses a peer waits for the word that the generation is over, or says so itself.
        if isinstance(error, Exception) and ending.is_lost_peer(error):
            if not self._over.wait(_HEAR_SECONDS):
                self.lost()
            self._over.wait(_HEAR_SECONDS)
        return self._over.is_set()

    def regroup(
        self,
        stopping: Callable[[], bool],
        before_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Go on to the next generation, or end this process with a line.

        Args:
            stopping: whether the next one only has to save the run, for which fewer than
                parallel.minimum will do.
            before_end: called on the main process where there is no next one, as too few replicas
                are left; not where the others go on without it, and need what it holds.
        """
        # End this generation on all processes, with all calls in flight here ...
        self.lost()
        self._over.wait(_HEAR_SECONDS)
        self.close()
        self._cut()
        # ... give back its groups, which may complain of what was cut ...
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            dist.destroy_process_group()
        # ... and wait for the next one.
        self._enter(lambda: self._membership.follow(stopping), before_end)

    def close(self) -> None:
        """Listen no more: the run, or this generation, is done."""
        self._done.set()
        self._listener.join()

    def _listen(self) -> None:
        """Wait for the end of this generation, and end all calls in flight."""
        pause = _LISTEN_SECONDS * max(1.0, self.topology.world / 200)
        try:
            while not self._heard.is_over():
                if self._done.wait(pause):
                    return
            # Who has said so is waited for longer: it reports as soon as its calls have ended.
            self._heard.say_alive()
        except RuntimeError:
            self._leave_without_store()
        self._over.set()
        self._cut()
        # A process that was about to connect when it heard opens its connections only now: it would
        # wait in vain.
        while not self._done.wait(_LISTEN_SECONDS):
            self._connections.cut()

    def _cut(self) -> None:
        """End all calls in flight of this generation."""
        cutting.abort_nccl()
        self._connections.cut()

    def _enter(
        self,
        generation: Callable[[], None],
        before_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Take part in a generation, or end this process.

        Args:
            generation: waits for it.
            before_end: see `regroup`.
        """
        try:
            generation()
        except LeftOut:
            ending.leave(
                f"replica {self._given.replica}, stage {self._given.stage}: the others went on without it; leaving",
                LEFT_OUT,
            )
        except TooFew:
            fault = (
                f"fewer replicas are left than parallel.minimum {self._minimum}; rerun to resume"
            )
            # Here nobody waits for it to end; the end itself would wait for no thread.
            with contextlib.suppress(RuntimeError):  # the store may be gone
                self._membership.close(before_end)
            ending.leave(fault if self._membership.member.replica == 0 else "")
        except RuntimeError:
            self._leave_without_store()

    def _leave_without_store(self) -> None:
        """End this process, since the launcher that serves the store is gone."""
        fault = "the launcher of the first host is gone, or the way to it; rerun to resume"
        ending.leave(fault, FAILED)

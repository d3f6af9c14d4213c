"""The generations of an elastic run: which replicas take part.

Their processes agree on them in the launcher's store.

A generation has members, in the order of their ranks. It is over when one of them is lost or
another one waits to be taken in. Then every process reports, and the first that sees all who can
still report writes down the next generation, by a compare and set: there is one value, so the
halves of a cut network never both go on. Needs no torch.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import (
    Callable,
    Collection,
    Dict,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Protocol,
    Sequence,
    Set,
    Tuple,
    Union,
)

LIFE = "POD_LIFE"  # of the environment: how often the launcher has started this replica before
_GRACE_SECONDS = 1.0  # for a thread of each member's processes to say that it is there
# A process of the first generation loads its libraries; a rendezvous waits as long.
_BEGIN_SECONDS = 50.0
_POLL_SECONDS = 0.01
_CLOSE_SECONDS = 600.0  # for a main process to send what is left to the mirror
_CLOSED = "elastic/closed"  # there is no next generation, and the main process has closed the run
_DEAD = "elastic/dead"  # members of which a launcher has seen the end
_STOP = "elastic/stop"  # a launcher was asked to stop the run
_SAVED = "elastic/saved"  # the run was asked to stop, and is saved


class Store(Protocol):
    """The methods of torch.distributed.Store that are used here.

    Each raises RuntimeError if the store is gone.
    """

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number at `key`, at first 0, and return it."""

    def append(self, key: str, value: str) -> None:
        """Append `value` to the text at `key`, at first ""."""

    def check(self, keys: List[str]) -> bool:
        """Return whether all `keys` have been written."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write `desired` at `key` if `expected` is there, or nothing and it is "".

        Return what is there then.
        """

    def get(self, key: str) -> bytes:
        """Return what is at `key`, which has been written."""

    def set(self, key: str, value: str) -> None:
        """Write `value` at `key`."""


class Member(NamedTuple):
    """A replica in one of its lives.

    replica: the number that the launcher gave it.
    life: how often its processes were started before.
    """

    replica: int
    life: int


class Regroup(Exception):
    """This generation is over; the run goes on with the next one."""


class TooFew(Exception):
    """There are fewer replicas than `parallel.minimum`."""


class LeftOut(Exception):
    """The others went on without this process."""


class Generations:
    """The generations as anyone sees them.

    number: of the newest generation that this one has looked at, from 0.
    members: its members, in the order of their ranks; () before the first.
    """

    def __init__(self, store: Store, stages: int):
        """
        Args:
            store: the launcher's, through a connection that no other thread uses.
            stages: of a replica.
        """
        self._store = store
        self._stages = stages
        self.number = 0
        self.members: Tuple[Member, ...] = ()

    def catch_up(self) -> None:
        """Look for newer generations."""
        number = self.number
        while self._store.check([_key("members", number)]):
            self.number = number
            self.members = self._written(number)
            number += 1

    def end(self) -> None:
        """Say that this generation is over; every process hears of it."""
        self._store.set(_key("end", self.number), "")

    def is_over(self) -> bool:
        """Return whether somebody has said that this generation is over."""
        return self._store.check([_key("end", self.number)])

    def bury(self, member: Member) -> None:
        """Say that the processes of a `member` are gone; a generation that has it is over."""
        self._store.append(_DEAD, f"{member.replica} {member.life};")
        # After the end is written: whoever founds a generation meanwhile reads it there.
        self.catch_up()
        if member in self.members:
            self.end()

    def next_life(self, replica: int) -> int:
        """Return a number for a new life of this `replica`, which no earlier one had."""
        return self._store.add(_key("life", replica), 1)

    def is_founded(self) -> bool:
        """Return whether there is a first generation."""
        return self._store.check([_key("members", 0)])

    def has_begun(self, member: Member) -> bool:
        """Return whether other processes may know one of this `member`'s.

        Such a member cannot be started as if new.
        """
        self.catch_up()
        if member.life > 0 or self.number > 0:
            return True
        return member in self._stages_reported("begun", 0)

    def has_met(self) -> bool:
        """Return whether the first generation may have met.

        Then all its processes have begun, so they may have trained.
        """
        self.catch_up()
        if not self.members:
            return False
        return self.number > 0 or set(self.members) <= self._reported("begun", 0)

    def ask_to_stop(self) -> None:
        """Let the launchers of all hosts know that the run is to stop."""
        self._store.set(_STOP, "")

    def is_to_stop(self) -> bool:
        """Return whether a launcher was asked to stop the run."""
        return self._store.check([_STOP])

    def is_saved(self) -> bool:
        """Return whether the run was asked to stop, and has saved its last step."""
        return self._store.check([_SAVED])

    def living(self) -> List[Member]:
        """Return the members of the newest generation of which no launcher has seen the end."""
        self.catch_up()
        return [member for member in self.members if member not in self._gone()]

    def _gone(self) -> Set[Member]:
        """Return the members of which a launcher has seen the end."""
        return {Member(replica, life) for replica, life in self._numbers(_DEAD)}

    def _reported(self, report: str, number: int) -> Set[Member]:
        """Return the members of which all processes have reported so in a generation."""
        reports = self._stages_reported(report, number)
        return {member for member, stages in reports.items() if len(stages) == self._stages}

    def _stages_reported(self, report: str, number: int) -> Dict[Member, Set[int]]:
        """Return the stages of each member whose processes have reported so in a generation."""
        stages: Dict[Member, Set[int]] = {}
        for replica, life, stage in self._numbers(_key(report, number)):
            member = Member(replica, life)
            stages.setdefault(member, set()).add(stage)
        return stages

    def _written(self, number: int) -> Tuple[Member, ...]:
        """Return the members of a generation that was decided on."""
        text = self._store.get(_key("members", number))
        return tuple(Member(replica, life) for replica, life in json.loads(text))

    def _numbers(self, key: str) -> List[List[int]]:
        """Return the entries of a list in the store, which are numbers each: `3 0;4 1;`.

        If there is none yet there are no entries.
        """
        if not self._store.check([key]):
            return []
        entries = self._store.get(key).decode().split(";")
        return [[int(number) for number in entry.split()] for entry in entries if entry]


class Membership(Generations):
    """The generations as one of the processes sees them: of `member` it computes a stage."""

    def __init__(
        self,
        store: Store,
        member: Member,
        stage: int,
        stages: int,
        minimum: int,
        silence: float,
    ):
        """
        Args:
            store: the launcher's, through a connection that no other thread uses.
            member: whose process this is.
            stage: that this process computes.
            stages: of a replica.
            minimum: replicas with which the run goes on.
            silence: seconds that a process which hears, but does not report, is waited for.
        """
        super().__init__(store, stages)
        self.member = member
        self._stage = stage
        self._minimum = minimum
        self._silence = silence

    def common(self, name: str, value: str) -> str:
        """Return the value of the first process that asked.

        Args:
            name: of the value.
            value: of this process.
        """
        return self._store.compare_set(_key("common", name), "", value).decode()

    def found(self, replicas: int) -> None:
        """Begin with all `replicas` in their first life.

        Raises LeftOut: the others have gone on without this one.
        """
        # All processes propose the same members; the first of them counts.
        self._report("begun")
        # All replicas are members: one that never comes is waited for like one that is lost.
        first = json.dumps([(replica, 0) for replica in range(replicas)])
        self._store.compare_set(_key("members", 0), "", first)
        self.catch_up()
        if self.member not in self.members:
            raise LeftOut
        # A member may have been lost before there was a generation to end.
        if self._gone().intersection(self.members):
            self.end()

    def note_saved(self) -> None:
        """Say that the run was asked to stop, and is saved: nothing is lost if it ends now."""
        self._store.set(_SAVED, "")

    def is_wanted(self) -> bool:
        """Return whether a replica waits, with all its processes, to be taken in."""
        here = self._reported("here", self.number) - self._gone()
        return any(member not in self.members for member in here)

    def say_alive(self) -> None:
        """Report that this process has heard that the generation is over."""
        self._report("alive")

    def join(self) -> None:
        """Wait until there is a generation with this new member.

        Raises TooFew: there will be none.
        """
        while True:
            self.catch_up()
            # The first generation has not been founded yet.
            if not self.members:
                time.sleep(_POLL_SECONDS)
                continue
            self._report("here")
            # If the next generation was decided on before, then the one after it.
            with contextlib.suppress(LeftOut):
                return self._next()

    def follow(self, stopping: Callable[[], bool] = lambda: False) -> None:
        """Report, and go on to the next generation.

        Args:
            stopping: whether the next one only has to save the run, for which any number of
                replicas will do.

        Raises:
            LeftOut: it is without this member.
            TooFew: there will be none.
        """
        self._report("here")
        self._next(stopping)

    def close(self, close: Callable[[], None]) -> None:
        """Close the run after TooFew: the main process does, and the others wait for it.

        A launcher ends all ranks as soon as one has ended.

        Args:
            close: what the main process closes.
        """
        main = self._written(self.number - 1)[0]
        if self.member == main and self._stage == 0:
            close()
            self._store.set(_CLOSED, "")
            return
        # One that has not reported is lost, or hangs.
        waits = main in self._reported("here", self.number - 1)
        end = time.monotonic() + _CLOSE_SECONDS
        while waits and time.monotonic() < end:
            waits = not self._store.check([_CLOSED]) and main not in self._gone()
            time.sleep(_POLL_SECONDS)

    def _next(self, stopping: Callable[[], bool] = lambda: False) -> None:
        """Wait for the next generation, or decide on it if this process is the first that can."""
        key = _key("members", self.number + 1)
        # Silence counts from the end of this generation: before, nobody has to report.
        over_since: Optional[float] = None
        while not self._store.check([key]):
            if over_since is None and self.is_over():
                over_since = time.monotonic()
            members = choice(
                self.members,
                here=self._reported("here", self.number),
                gone=self._gone(),
                limits=self._limits(),
                waited=None if over_since is None else time.monotonic() - over_since,
                minimum=1 if stopping() else self._minimum,
                silence=self._silence,
            )
            # Processes may see different reports, and propose different members.
            if members is not None:
                # Only the first of these counts, so that all have one generation.
                self._store.compare_set(key, "", json.dumps(members))
            time.sleep(_POLL_SECONDS)
        self.number += 1
        self.members = self._written(self.number)
        if not self.members:
            raise TooFew
        if self.member not in self.members:
            raise LeftOut

    def _limits(self) -> Dict[Member, float]:
        """Return the seconds that each member is waited for once this generation is over."""
        alive = self._reported("alive", self.number)
        begun = self._reported("begun", 0) if self.number == 0 else set(self.members)
        limits = {}
        for member in self.members:
            # It has heard of the end, so that it reports unless it hangs.
            if member in alive:
                limits[member] = self._silence
            # A thread of each of its processes would have heard by now, if they were there.
            elif member in begun:
                limits[member] = min(self._silence, _GRACE_SECONDS)
            # It may still load its libraries.
            else:
                limits[member] = _BEGIN_SECONDS
        return limits

    def _report(self, report: str) -> None:
        """Report something of this process, in this generation."""
        process = f"{self.member.replica} {self.member.life} {self._stage};"
        self._store.append(_key(report, self.number), process)


def choice(
    members: Sequence[Member],
    here: Collection[Member],
    gone: Collection[Member],
    limits: Mapping[Member, float],
    waited: Optional[float],
    minimum: int,
    silence: float,
) -> Optional[Tuple[Member, ...]]:
    """Choose the next generation: members of this one first, in their order, then new ones.

    Args:
        members: of this generation.
        here: members, and new ones, whose processes all wait for the next one.
        gone: those whose launcher has seen their end.
        limits: seconds that each member is waited for.
        waited: seconds since this generation was over; None if it is not.
        minimum: members that the next one needs.
        silence: seconds that too few of them wait for more.

    Returns:
        The members. None: it is not time to choose yet. Empty: there are too few.
    """
    # Is there a member that may still come?
    for member in members:
        if member in here or member in gone:
            continue
        if waited is None or waited < limits[member]:
            return None
    # Whoever has come, and lives. Older members are first: they know the run's state.
    remaining = [member for member in members if member in here and member not in gone]
    new = [member for member in here if member not in members and member not in gone]
    chosen = (*remaining, *sorted(new))
    if len(chosen) >= minimum:
        return chosen
    # Too few: more may come, for a while.
    if waited is not None and waited > silence:
        return ()
    return None


def _key(name: str, number: Union[int, str]) -> str:
    """Return the key in the store of something in a generation, or with another name."""
    return f"elastic/{name}/{number}"

"""Which replicas make up an elastic run: generations, which their processes agree on in the launcher's store.

A generation has members, in the order of their ranks. It is over when one of them is lost or another one waits to be
taken in. Then every process reports, and the first that sees all who can still report writes down the next generation,
by a compare and set: there is one value, so the halves of a cut network never both go on. Needs no torch.
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
_BEGIN_SECONDS = 50.0  # for a process of the first generation to load its libraries, as long as a rendezvous waits
_POLL_SECONDS = 0.01
_DEAD = "elastic/dead"  # members of which a launcher has seen the end
_STOP = "elastic/stop"  # a launcher was asked to stop the run
_SAVED = "elastic/saved"  # the run was asked to stop, and is saved


class Store(Protocol):
    """What is used of torch.distributed.Store."""

    def add(self, key: str, amount: int) -> int: ...
    def append(self, key: str, value: str) -> None: ...
    def check(self, keys: List[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def get(self, key: str) -> bytes: ...
    def set(self, key: str, value: str) -> None: ...


class Member(NamedTuple):
    """replica: the number that the launcher gave it. life: how often its processes were started before."""

    replica: int
    life: int


class Regroup(Exception):
    """This generation is over; the run goes on with the next one."""


class TooFew(Exception):
    """There are fewer replicas than `parallel.minimum`."""


class LeftOut(Exception):
    """The others went on without this process."""


class Generations:
    """The generations as anyone sees them. number, members: of the newest that this one has looked at."""

    def __init__(self, store: Store, stages: int):
        """Args: stages: of a replica."""
        self._store = store
        self._stages = stages
        self.number = 0
        self.members: Tuple[Member, ...] = ()

    def catch_up(self) -> None:
        """Look for newer generations."""
        number = self.number
        while self._store.check([_key("members", number)]):
            self.number, self.members = number, self._written(number)
            number += 1

    def end(self) -> None:
        """This generation is over; every process hears of it."""
        self._store.set(_key("end", self.number), "")

    def is_over(self) -> bool:
        return self._store.check([_key("end", self.number)])

    def bury(self, member: Member) -> None:
        """The processes of a member are gone; a generation that has it is over."""
        self._store.append(_DEAD, f"{member.replica} {member.life};")
        self.catch_up()
        if member in self.members:
            self.end()

    def next_life(self, replica: int) -> int:
        """Return a number that none of this replica's lives had, for processes that are started again."""
        return self._store.add(_key("life", replica), 1)

    def is_founded(self) -> bool:
        """Return whether there is a first generation."""
        return self._store.check([_key("members", 0)])

    def has_begun(self, member: Member) -> bool:
        """Return whether other processes may know one of this member's, which then cannot be started as if new."""
        self.catch_up()
        return member.life > 0 or self.number > 0 or member in self._stages_reported("begun", 0)

    def has_met(self) -> bool:
        """Return whether the first generation may have met: all its processes have begun, so they may have trained."""
        self.catch_up()
        if not self.members:
            return False
        return self.number > 0 or set(self.members) <= self._reported("begun", 0)

    def ask_to_stop(self) -> None:
        """The run is to stop: the launchers of all hosts hear of it."""
        self._store.set(_STOP, "")

    def is_to_stop(self) -> bool:
        """Return whether a launcher was asked to stop the run."""
        return self._store.check([_STOP])

    def is_saved(self) -> bool:
        """Return whether the run was asked to stop, and has saved its last step."""
        return self._store.check([_SAVED])

    def living(self) -> List[Member]:
        """Members of the newest generation of which no launcher has seen the end."""
        self.catch_up()
        return [member for member in self.members if member not in self._gone()]

    def _gone(self) -> Set[Member]:
        return {Member(*numbers) for numbers in self._numbers(_DEAD)}

    def _reported(self, what: str, number: int) -> Set[Member]:
        """Return the members of which all processes have reported so in a generation."""
        reports = self._stages_reported(what, number)
        return {member for member, stages in reports.items() if len(stages) == self._stages}

    def _stages_reported(self, what: str, number: int) -> Dict[Member, Set[int]]:
        stages: Dict[Member, Set[int]] = {}
        for replica, life, stage in self._numbers(_key(what, number)):
            stages.setdefault(Member(replica, life), set()).add(stage)
        return stages

    def _written(self, number: int) -> Tuple[Member, ...]:
        return tuple(Member(*each) for each in json.loads(self._store.get(_key("members", number))))

    def _numbers(self, key: str) -> List[List[int]]:
        if not self._store.check([key]):
            return []
        return [list(map(int, entry.split())) for entry in self._store.get(key).decode().split(";") if entry]


class Membership(Generations):
    """The generations as one of the processes sees them: of `member` it computes `stage`, one of `stages`."""

    def __init__(self, store: Store, member: Member, stage: int, stages: int, minimum: int, silence: float):
        super().__init__(store, stages)
        self.member, self._stage = member, stage
        self._minimum, self._silence = minimum, silence

    def common(self, what: str, own: str) -> str:
        """What the first process that asked had of this."""
        return self._store.compare_set(_key("common", what), "", own).decode()

    def found(self, replicas: int) -> None:
        """Begin with all replicas in their first life. Raises LeftOut: the others have gone on without this one."""
        self._report("begun")
        self._store.compare_set(_key("members", 0), "", json.dumps([(replica, 0) for replica in range(replicas)]))
        self.catch_up()
        if self.member not in self.members:
            raise LeftOut
        if self._gone().intersection(self.members):  # it was lost before there was a generation to end
            self.end()

    def note_saved(self) -> None:
        """The run was asked to stop, and is saved: whatever ends it now, nothing is lost."""
        self._store.set(_SAVED, "")

    def is_wanted(self) -> bool:
        """Whether a replica waits, with all its processes, to be taken in."""
        return any(member not in self.members for member in self._reported("here", self.number) - self._gone())

    def say_alive(self) -> None:
        """This process has heard that the generation is over, whatever else it is doing."""
        self._report("alive")

    def join(self) -> None:
        """Wait until there is a generation with this new member. Raises TooFew: there will be none."""
        while True:
            self.catch_up()
            if not self.members:  # the first one has not been founded
                time.sleep(_POLL_SECONDS)
                continue
            self._report("here")
            with contextlib.suppress(LeftOut):  # one was decided on before: then the one after it
                return self._next()

    def follow(self, stopping: Callable[[], bool] = lambda: False) -> None:
        """Report, and go on to the next generation.

        Args: stopping: whether the next one only has to save the run, for which any number of replicas will do.
        Raises LeftOut: it is without this member. TooFew: there will be none.
        """
        self._report("here")
        self._next(stopping)

    def _next(self, stopping: Callable[[], bool] = lambda: False) -> None:
        over: Optional[float] = None  # since when
        key = _key("members", self.number + 1)
        while not self._store.check([key]):
            if over is None and self.is_over():
                over = time.monotonic()
            chosen = choice(
                self.members,
                here=self._reported("here", self.number),
                gone=self._gone(),
                limits=self._limits(),
                waited=None if over is None else time.monotonic() - over,
                minimum=1 if stopping() else self._minimum,
                silence=self._silence,
            )
            if chosen is not None:
                self._store.compare_set(key, "", json.dumps(chosen))
            time.sleep(_POLL_SECONDS)
        self.number += 1
        self.members = self._written(self.number)
        if not self.members:
            raise TooFew
        if self.member not in self.members:
            raise LeftOut

    def _limits(self) -> Dict[Member, float]:
        """Return how long each member of this generation is waited for once it is over, in seconds."""
        alive = self._reported("alive", self.number)
        begun = self._reported("begun", 0) if self.number == 0 else set(self.members)
        limits = {}
        for member in self.members:
            if member in alive:
                limits[member] = self._silence
            elif member in begun:
                limits[member] = min(self._silence, _GRACE_SECONDS)
            else:
                limits[member] = _BEGIN_SECONDS
        return limits

    def _report(self, what: str) -> None:
        self._store.append(_key(what, self.number), f"{self.member.replica} {self.member.life} {self._stage};")


def choice(
    members: Sequence[Member],
    here: Collection[Member],
    gone: Collection[Member],
    limits: Mapping[Member, float],
    waited: Optional[float],
    minimum: int,
    silence: float,
) -> Optional[Tuple[Member, ...]]:
    """The next generation: those of this one first, in their order, then new ones. None: it is not time to choose yet.
    Empty: there are too few.

    Args: here: whose processes wait for it all. gone: whose launcher has seen their end. limits: seconds that each
    member is waited for. waited: seconds since this one was over, None if it is not.
    """
    for member in members:
        if member in here or member in gone:
            continue
        if waited is None or waited < limits[member]:
            return None
    chosen = [member for member in members if member in here and member not in gone]
    chosen += sorted(member for member in here if member not in members and member not in gone)
    if len(chosen) >= minimum:
        return tuple(chosen)
    return () if waited is not None and waited > silence else None


def _key(name: str, number: Union[int, str]) -> str:
    return f"elastic/{name}/{number}"

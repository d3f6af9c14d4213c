"""Which replicas make up an elastic run: generations, which their processes agree on in the launcher's store.

A generation has members, in the order of their ranks. It is over when one of them is lost or another one waits to be
taken in. Then every process reports, and the first that sees all who can still report writes down the next generation,
by a compare and set: there is one value, so the halves of a cut network never both go on. Needs no torch.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import Collection, Dict, List, NamedTuple, Optional, Protocol, Sequence, Set, Tuple, Union

LIFE = "POD_LIFE"  # of the environment: how often the launcher has started this replica before
_GRACE_SECONDS = 1.0  # for a thread of each member's processes to say that it is there
_POLL_SECONDS = 0.01
_DEAD = "elastic/dead"  # members of which a launcher has seen the end


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

    def __init__(self, store: Store):
        self._store = store
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
        """Of a replica that is started again: a number that none of its lives had."""
        return self._store.add(_key("life", replica), 1)

    def living(self) -> List[Member]:
        """Members of the newest generation of which no launcher has seen the end."""
        self.catch_up()
        return [member for member in self.members if member not in self._gone()]

    def _gone(self) -> Set[Member]:
        return {Member(*numbers) for numbers in self._numbers(_DEAD)}

    def _written(self, number: int) -> Tuple[Member, ...]:
        return tuple(Member(*each) for each in json.loads(self._store.get(_key("members", number))))

    def _numbers(self, key: str) -> List[List[int]]:
        if not self._store.check([key]):
            return []
        return [list(map(int, entry.split())) for entry in self._store.get(key).decode().split(";") if entry]


class Membership(Generations):
    """The generations as one of the processes sees them: of `member` it computes `stage`, one of `stages`."""

    def __init__(self, store: Store, member: Member, stage: int, stages: int, minimum: int, silence: float):
        super().__init__(store)
        self.member, self._stage, self._stages = member, stage, stages
        self._minimum, self._silence = minimum, silence

    def common(self, what: str, own: str) -> str:
        """What the first process that asked had of this."""
        return self._store.compare_set(_key("common", what), "", own).decode()

    def found(self, replicas: int) -> None:
        """Begin with all replicas in their first life. Raises LeftOut: the others have gone on without this one."""
        self._store.compare_set(_key("members", 0), "", json.dumps([(replica, 0) for replica in range(replicas)]))
        self.catch_up()
        if self.member not in self.members:
            raise LeftOut

    def is_wanted(self) -> bool:
        """Whether a replica waits, with all its processes, to be taken in."""
        return any(member not in self.members for member in self._reported("here") - self._gone())

    def say_alive(self) -> None:
        """This process has heard that the generation is over, whatever else it is doing."""
        self._report("alive")

    def join(self) -> None:
        """Wait until there is a generation with this new member. Raises TooFew: there will be none."""
        while True:
            self.catch_up()
            self._report("here")
            with contextlib.suppress(LeftOut):  # one was decided on before: then the one after it
                return self._next()

    def follow(self) -> None:
        """Report, and go on to the next generation.

        Raises LeftOut: it is without this member. TooFew: there will be none.
        """
        self._report("here")
        self._next()

    def _next(self) -> None:
        over: Optional[float] = None  # since when
        key = _key("members", self.number + 1)
        while not self._store.check([key]):
            if over is None and self.is_over():
                over = time.monotonic()
            waited = None if over is None else time.monotonic() - over
            here, alive = self._reported("here"), self._reported("alive")
            chosen = choice(self.members, here, alive, self._gone(), waited, self._minimum, self._silence)
            if chosen is not None:
                self._store.compare_set(key, "", json.dumps(chosen))
            time.sleep(_POLL_SECONDS)
        self.number += 1
        self.members = self._written(self.number)
        if not self.members:
            raise TooFew
        if self.member not in self.members:
            raise LeftOut

    def _report(self, what: str) -> None:
        self._store.append(_key(what, self.number), f"{self.member.replica} {self.member.life} {self._stage};")

    def _reported(self, what: str) -> Set[Member]:
        """The members of which all processes have reported so."""
        stages: Dict[Member, Set[int]] = {}
        for replica, life, stage in self._numbers(_key(what, self.number)):
            stages.setdefault(Member(replica, life), set()).add(stage)
        return {member for member, found in stages.items() if len(found) == self._stages}


def choice(
    members: Sequence[Member],
    here: Collection[Member],
    alive: Collection[Member],
    gone: Collection[Member],
    waited: Optional[float],
    minimum: int,
    silence: float,
) -> Optional[Tuple[Member, ...]]:
    """The next generation: those of this one first, in their order, then new ones. None: it is not time to choose yet.
    Empty: there are too few.

    Args: here: whose processes wait for it all. alive: whose processes have heard that this one is over. gone: whose
    launcher has seen their end. waited: seconds since it was over, None if it is not.
    """
    for member in members:
        if member in here or member in gone:
            continue
        if waited is None or waited < (silence if member in alive else min(silence, _GRACE_SECONDS)):
            return None
    chosen = [member for member in members if member in here and member not in gone]
    chosen += sorted(member for member in here if member not in members and member not in gone)
    if len(chosen) >= minimum:
        return tuple(chosen)
    return () if waited is not None and waited > silence else None


def _key(name: str, number: Union[int, str]) -> str:
    return f"elastic/{name}/{number}"

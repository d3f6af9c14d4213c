"""Kinds of faults: how each strikes, the message that must follow, and its repair before the run is resumed."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Callable, Dict, Mapping, NamedTuple, Optional, Tuple

from benchmarks.faults.site import STEPS, Ending, Session, Site, Topology
from benchmarks.processes import children

ONE, REPLICAS, BOTH = Topology(1, 1), Topology(2, 1), Topology(2, 2)
KILLED = -signal.SIGKILL
_YEAR = 365 * 86_400.0


class Struck(NamedTuple):
    """When a fault struck, and how the session then ended.

    said: regular expression that must be found in that. noticed: seconds until the first of the other ranks had ended.
    """

    step: int
    ending: Ending
    said: str = ""
    noticed: Optional[float] = None


Strike = Callable[[Site, Session, random.Random], Struck]


class Kind(NamedTuple):
    """One kind of fault.

    trials: how often it is tried on each topology. codes: exit codes that are right. strike: makes it happen in a
    session. mend: makes the run fit to be resumed. resumed: what the resumed session must say, as a regular expression.
    overrides: of the recipe. shim, disk, shards: what its site needs.
    """

    trials: Mapping[Topology, int]
    codes: Tuple[int, ...]
    strike: Strike
    mend: Callable[[Site], None] = lambda site: None
    resumed: str = ""
    overrides: Tuple[str, ...] = ()
    shim: bool = False
    disk: bool = False
    shards: bool = False


def _moment(site: Site, session: Session, draws: random.Random, first: int = 0, last: int = STEPS - 2) -> int:
    """Wait for a random moment of the run: before its first step, or amid or between any of its steps."""
    step = draws.randint(first, last)
    session.reach(step, delay=draws.uniform(0, 8.0 if step == 0 else 0.15))
    return site.steps()


def _striking(
    act: Callable[[Site, Session, random.Random], None],
    message: str = "",
    first: int = 1,
    last: int = STEPS - 2,
    afterwards: Optional[Callable[[Path, random.Random], None]] = None,
) -> Strike:
    """act() at a random moment; `afterwards` is done to the newest checkpoint once the session has ended."""

    def strike(site: Site, session: Session, draws: random.Random) -> Struck:
        step = _moment(site, session, draws, first, last)
        since = time.monotonic()
        act(site, session, draws)
        ending = session.wait(since)
        if afterwards is not None:
            afterwards(site.checkpoints()[-1], draws)
        return Struck(step, ending, message)

    return strike


def _kill(site: Site, session: Session, draws: random.Random) -> None:
    session.process.kill()  # the launcher alone: its ranks are to die with it


def _terminate(site: Site, session: Session, draws: random.Random) -> None:
    session.process.terminate()


def _signalling_rank(number: int, message: str) -> Strike:
    """One rank is sent a signal. Args: message: of the rank, as a regular expression with {rank} in it."""

    def strike(site: Site, session: Session, draws: random.Random) -> Struck:
        step = _moment(site, session, draws, first=1)
        ranks = session.ranks()
        rank = draws.choice(sorted(ranks))
        since = time.monotonic()
        _signal(ranks.pop(rank), number)
        noticed = session.noticed(ranks, since)
        return Struck(step, session.wait(since), message.format(rank=rank), noticed)

    return strike


def _fill_disk(site: Site, session: Session, draws: random.Random) -> None:
    for size in (1 << 16, 1):
        with open(site.folder / "filler", "ab", buffering=0) as stream, contextlib.suppress(OSError):
            while True:
                stream.write(bytes(size))


def _break_disk(site: Site, session: Session, draws: random.Random) -> None:
    site.control(0, broken_disk=True)


def _flip(path: Path, draws: random.Random) -> None:
    with open(path, "r+b") as stream:
        stream.seek(draws.randrange(path.stat().st_size))
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1 << draws.randrange(8)]))


def _truncate(path: Path, draws: random.Random) -> None:
    os.truncate(path, draws.randrange(path.stat().st_size))


def _jump(site: Site, session: Session, draws: random.Random) -> None:
    """The time of day is set five times, by up to a year, forwards and backwards; the run is to take no notice."""
    for _ in range(5):
        site.control(draws.uniform(-_YEAR, _YEAR), broken_disk=False)
        session.reach(0, delay=draws.uniform(0, 0.3))


def _kill_worker(site: Site, session: Session, draws: random.Random) -> None:
    workers = children(session.process.pid)
    if workers:
        _signal(draws.choice(workers), signal.SIGKILL)


def _delete_shard(site: Site, session: Session, draws: random.Random) -> Struck:
    """Deleted while the run goes on, which is killed a little later; the next session is to name the shard."""
    step = _moment(site, session, draws, first=1, last=STEPS - 8)
    shard = draws.choice(sorted((site.folder / "shards" / "train").glob("*.tar")))
    shard.rename(shard.with_suffix(".away"))
    session.reach(step + 2, delay=0.0)
    session.process.kill()
    session.wait(time.monotonic())
    since = time.monotonic()
    return Struck(step, site.start().wait(since), re.escape(shard.name))


def _restore_control(site: Site) -> None:
    site.control(0, broken_disk=False)


def _restore_shard(site: Site) -> None:
    for path in (site.folder / "shards" / "train").glob("*.away"):
        path.rename(path.with_suffix(".tar"))


def _signal(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


_PASSED_OVER = "damaged.*trying the one before"
_FULL, _BROKEN = "No space left on device", "Input/output error"
_ENDED = r"rank {rank} \(host .*\) was killed"
KINDS: Dict[str, Kind] = {
    "run killed": Kind({ONE: 4, REPLICAS: 4, BOTH: 4}, (KILLED,), _striking(_kill, first=0)),
    "rank killed": Kind({REPLICAS: 4, BOTH: 4}, (1,), _signalling_rank(signal.SIGKILL, _ENDED)),
    "run told to stop": Kind({ONE: 3, REPLICAS: 3, BOTH: 3}, (75,), _striking(_terminate, r"SIGTERM: .*finish")),
    "rank stopped": Kind(
        {REPLICAS: 3, BOTH: 3}, (1,), _signalling_rank(signal.SIGSTOP, r"rank {rank} has said nothing for \d+ s")
    ),
    "disk full": Kind(
        {ONE: 2, REPLICAS: 2}, (1,), _striking(_fill_disk, _FULL, last=STEPS - 6),
        lambda site: (site.folder / "filler").unlink(), disk=True,
    ),
    "disk fails": Kind(
        {ONE: 2, REPLICAS: 2}, (1,), _striking(_break_disk, _BROKEN, last=STEPS - 6), _restore_control, shim=True
    ),
    "checkpoint truncated": Kind(
        {ONE: 2, BOTH: 1}, (KILLED,), _striking(_kill, first=8, afterwards=_truncate), resumed=_PASSED_OVER
    ),
    "checkpoint's bit flipped": Kind(
        {ONE: 2, BOTH: 1}, (KILLED,), _striking(_kill, first=8, afterwards=_flip), resumed=_PASSED_OVER
    ),
    "clock jumps": Kind(
        {ONE: 1, REPLICAS: 1, BOTH: 1}, (0,), _striking(_jump, first=0), _restore_control, shim=True
    ),
    "worker killed": Kind({ONE: 3}, (1,), _striking(_kill_worker, "worker"), overrides=("data.workers=1",)),
    "shard deleted": Kind({ONE: 2}, (2,), _delete_shard, _restore_shard, shards=True),
}  # fmt: skip


@contextlib.contextmanager
def small_disk(folder: Path):
    """A file system of its own at `folder`, which a run fills; root alone can make one."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        shutil.rmtree(folder, ignore_errors=True)

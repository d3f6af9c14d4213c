"""Kinds of faults: how each strikes, the message that must follow, and its repair before the run is resumed."""

import contextlib
import functools
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Callable, Dict, Mapping, NamedTuple, Optional, Tuple

from benchmarks.faults import hosts
from benchmarks.faults.site import Effect, Session, Site, Topology, send
from benchmarks.processes import children

ONE, REPLICAS, THREE, BOTH = Topology(1, 1), Topology(2, 1), Topology(3, 1), Topology(2, 2)
# Six micro batches a step are those of one to three replicas; a checkpoint every 3 steps, an evaluation every 11.
SHORT = ("run.epochs=2", "batch.global=120", "checkpoint.every_epochs=0.3", "evaluation.every_epochs=1")
STEPS = 22
KILLED = -signal.SIGKILL
_YEAR = 365 * 86_400.0


class Kind(NamedTuple):
    """One kind of fault.

    trials: how often it is tried on each topology. codes: exit codes that are right. strike: makes it happen. said,
    resumed: what the session that is struck, and the next, must print (regular expressions). first, last: steps between
    which it strikes at random (0: also before the first). afterwards: is done to the newest checkpoint once the session
    has ended. mend: makes the run fit to be resumed. overrides: of the recipe. shim, disk, shards: what its site needs.
    hosts: each replica has a host of its own.
    """

    trials: Mapping[Topology, int]
    codes: Tuple[int, ...]
    strike: Callable[[Site, Session, random.Random], Optional[Effect]]
    said: str = ""
    first: int = 1
    last: int = STEPS - 2
    afterwards: Optional[Callable[[Path, random.Random], None]] = None
    mend: Callable[[Site], None] = lambda site: None
    resumed: str = ""
    overrides: Tuple[str, ...] = ()
    shim: bool = False
    disk: bool = False
    shards: bool = False
    hosts: bool = False


def _kill(site: Site, session: Session, draws: random.Random) -> None:
    session.process.kill()  # the launcher alone: its ranks are to die with it


def _signal_rank(number: int, said: str, site: Site, session: Session, draws: random.Random) -> Effect:
    """One rank is sent a signal. Args: said: with {rank} in it."""
    ranks, since = session.ranks(), time.monotonic()
    rank = draws.choice(sorted(ranks))
    send(ranks.pop(rank), number)
    return Effect(said=said.format(rank=rank), noticed=session.noticed(ranks, since))


def _fill_disk(site: Site, session: Session, draws: random.Random) -> None:
    for size in (1 << 16, 1):
        with open(site.folder / "filler", "ab", buffering=0) as stream, contextlib.suppress(OSError):
            while True:
                stream.write(bytes(size))


def _flip(path: Path, draws: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
    path.write_bytes(data)


def _jump(site: Site, session: Session, draws: random.Random) -> None:
    """The time of day is set five times, by up to a year, forwards and backwards; the run is to take no notice."""
    for _ in range(5):
        site.control(draws.uniform(-_YEAR, _YEAR), broken_disk=False)
        session.reach(0, delay=draws.uniform(0, 0.3))


def _kill_worker(site: Site, session: Session, draws: random.Random) -> None:
    workers = children(session.process.pid)
    if workers:
        send(draws.choice(workers), signal.SIGKILL)


def _delete_shard(site: Site, session: Session, draws: random.Random) -> Effect:
    """Deleted while the run goes on, which is killed a little later; the next session is to name the shard."""
    shard = draws.choice(sorted((site.folder / "shards" / "train").glob("*.tar")))
    shard.rename(shard.with_suffix(".away"))
    session.reach(site.steps() + 2, delay=0.0)
    session.process.kill()
    session.wait(time.monotonic())
    return Effect(site.start(), time.monotonic(), re.escape(shard.name))


def _restore_shard(site: Site) -> None:
    for path in (site.folder / "shards" / "train").glob("*.away"):
        path.rename(path.with_suffix(".tar"))


_damaged = functools.partial(
    Kind, {ONE: 30, REPLICAS: 8, BOTH: 3}, (KILLED,), _kill, first=8, resumed="damaged.*trying the one before"
)
_on_shim = functools.partial(Kind, mend=lambda site: site.control(0, broken_disk=False), shim=True)
_on_hosts = functools.partial(Kind, hosts=True)
KINDS: Dict[str, Kind] = {
    "run killed": Kind({ONE: 60, REPLICAS: 20, BOTH: 8}, (KILLED,), _kill, first=0),
    "rank killed": Kind(
        {REPLICAS: 36, BOTH: 10}, (1,),
        functools.partial(_signal_rank, signal.SIGKILL, r"rank {rank} \(host .*\) was killed"),
    ),
    "run told to stop": Kind(
        {ONE: 40, REPLICAS: 18, BOTH: 5}, (75,), lambda site, session, draws: session.process.terminate(),
        r"SIGTERM: .*finish",
    ),
    "rank stopped": Kind(
        {REPLICAS: 24, BOTH: 6}, (1,),
        functools.partial(_signal_rank, signal.SIGSTOP, r"rank {rank} has said nothing for \d+ s"),
    ),
    "link cut": _on_hosts({REPLICAS: 24, THREE: 6}, (1,), hosts.cut, mend=hosts.SiteOnHosts.mend),
    "link cut for a moment": _on_hosts({REPLICAS: 19, THREE: 3}, (0,), hosts.cut_for_a_moment, last=STEPS - 6),
    "host slow": _on_hosts({REPLICAS: 22, THREE: 4}, (0,), hosts.slow_down, last=STEPS - 6),
    "link slow": _on_hosts({REPLICAS: 12, THREE: 2}, (0,), hosts.slow_cable, last=STEPS - 6),
    "disk full": Kind(
        {ONE: 16, REPLICAS: 5}, (1,), _fill_disk, "No space left on device", last=STEPS - 6,
        mend=lambda site: (site.folder / "filler").unlink(), disk=True,
    ),
    "disk fails": _on_shim(
        {ONE: 16, REPLICAS: 5}, (1,), lambda site, session, draws: site.control(0, broken_disk=True),
        "Input/output error", last=STEPS - 6,
    ),
    "checkpoint truncated": _damaged(
        afterwards=lambda path, draws: os.truncate(path, draws.randrange(path.stat().st_size))
    ),
    "checkpoint's bit flipped": _damaged(afterwards=_flip),
    "clock jumps": _on_shim({ONE: 12, REPLICAS: 4, BOTH: 2}, (0,), _jump, first=0),
    "worker killed": Kind({ONE: 22}, (1,), _kill_worker, "worker", overrides=("data.workers=1",)),
    "shard deleted": Kind({ONE: 17}, (2,), _delete_shard, last=STEPS - 8, mend=_restore_shard, shards=True),
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

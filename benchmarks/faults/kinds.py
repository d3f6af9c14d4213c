"""Kinds of faults: how each strikes, the message that must follow, and its repair before the run is
resumed.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Callable, Dict, Iterator, Mapping, NamedTuple, Optional, Tuple

from benchmarks.faults import hosts
from benchmarks.faults.hosts import AnySession, Launchers, SiteOnHosts
from benchmarks.faults.site import Effect, Session, Site, Topology, send
from benchmarks.processes import children

ONE = Topology(1, 1)
REPLICAS = Topology(2, 1)
THREE = Topology(3, 1)
BOTH = Topology(2, 2)
# Six micro batches a step are those of one to three replicas; a checkpoint every 3 steps, an
# evaluation every 11.
SHORT = (
    "run.epochs=2",
    "batch.global=120",
    "checkpoint.every_epochs=0.3",
    "evaluation.every_epochs=1",
)
STEPS = 22
KILLED = -signal.SIGKILL
_YEAR = 365 * 86_400.0

# Makes a fault happen to a session of a site, with what is random in it.
Strike = Callable[[Site, AnySession, random.Random], Optional[Effect]]
# Damages the file of a checkpoint.
Damage = Callable[[Path, random.Random], None]


def _mend_nothing(site: Site) -> None:
    """Leave a run as it is."""


class Kind(NamedTuple):
    """One kind of fault.

    trials: how often it is tried on each topology.
    codes: exit codes that are right.
    strike: makes it happen.
    said: what the session that is struck must print, a regular expression.
    first, last: steps between which it strikes at random (0: also before the first).
    afterwards: is done to the newest checkpoint once the session has ended.
    mend: makes the run fit to be resumed.
    resumed: what the next session must print, a regular expression.
    overrides: of the recipe.
    shim, disk, shards: whether its site needs the library of shim.c, a small disk, or images in
        shards.
    hosts: each replica has a host of its own.
    """

    trials: Mapping[Topology, int]
    codes: Tuple[int, ...]
    strike: Strike
    said: str = ""
    first: int = 1
    last: int = STEPS - 2
    afterwards: Optional[Damage] = None
    mend: Callable[[Site], None] = _mend_nothing
    resumed: str = ""
    overrides: Tuple[str, ...] = ()
    shim: bool = False
    disk: bool = False
    shards: bool = False
    hosts: bool = False


def _on_one_host(strike: Callable[[Site, Session, random.Random], Optional[Effect]]) -> Strike:
    """Return a strike for kinds without hosts, whose session has one launcher."""

    def strike_session(site: Site, session: AnySession, draws: random.Random) -> Optional[Effect]:
        """Strike a `session` of a `site`, with what is random in `draws`."""
        assert isinstance(session, Session)
        return strike(site, session, draws)

    return strike_session


def _on_hosts(
    strike: Callable[[SiteOnHosts, Launchers, random.Random], Optional[Effect]],
) -> Strike:
    """Return a strike for kinds with hosts, whose session has a launcher on each."""

    def strike_hosts(site: Site, session: AnySession, draws: random.Random) -> Optional[Effect]:
        """Strike a `session` of a `site` with hosts, with what is random in `draws`."""
        assert isinstance(site, SiteOnHosts)
        assert isinstance(session, Launchers)
        return strike(site, session, draws)

    return strike_hosts


@_on_one_host
def _kill(site: Site, session: Session, draws: random.Random) -> None:
    """Kill the launcher alone: its ranks are to die with it."""
    session.process.kill()


@_on_one_host
def _tell_to_stop(site: Site, session: Session, draws: random.Random) -> None:
    """Ask the launcher to stop."""
    session.process.terminate()


def _signal_rank(number: signal.Signals, said: str) -> Strike:
    """Return the strike that sends a signal to one rank, of which `said` has {rank} in it."""

    @_on_one_host
    def strike(site: Site, session: Session, draws: random.Random) -> Optional[Effect]:
        """Send the signal to a rank of a `session` of a `site`, chosen by `draws`."""
        ranks = session.ranks()
        # The run was faster, so that the trial will be tried again.
        if not ranks:
            return None
        since = time.monotonic()
        rank = draws.choice(sorted(ranks))
        send(ranks.pop(rank), number)
        # The other ranks are to notice; the one that was sent the signal was taken out.
        noticed = session.noticed(ranks, since)
        return Effect(said=said.format(rank=rank), noticed=noticed)

    return strike


def _fill_disk(site: Site, session: AnySession, draws: random.Random) -> None:
    """Fill the site's disk to the last byte."""
    filler = site.folder / "filler"
    # Large pieces for most of it, and then single bytes for the rest.
    for size in (1 << 16, 1):
        with open(filler, "ab", buffering=0) as stream, contextlib.suppress(OSError):
            while True:
                stream.write(bytes(size))


def _break_disk(site: Site, session: AnySession, draws: random.Random) -> None:
    """Let every fsync fail."""
    site.control(0, broken_disk=True)


def _jump(site: Site, session: AnySession, draws: random.Random) -> None:
    """Set the time of day five times, by up to a year, forwards and backwards.

    The run is to take no notice.
    """
    for _ in range(5):
        site.control(draws.uniform(-_YEAR, _YEAR), broken_disk=False)
        session.reach(0, delay=draws.uniform(0, 0.3))


@_on_one_host
def _kill_worker(site: Site, session: Session, draws: random.Random) -> None:
    """Kill a process that loads images, if there is one."""
    workers = children(session.process.pid)
    if workers:
        send(draws.choice(workers), signal.SIGKILL)


@_on_one_host
def _delete_shard(site: Site, session: Session, draws: random.Random) -> Effect:
    """Take a shard away while the run goes on, and kill that a little later.

    The next session is to name the shard.
    """
    shard = draws.choice(sorted((site.folder / "shards" / "train").glob("*.tar")))
    shard.rename(shard.with_suffix(".away"))
    session.reach(site.steps() + 2, delay=0.0)
    session.process.kill()
    session.wait(time.monotonic())
    return Effect(site.start(), time.monotonic(), re.escape(shard.name))


def _cut_short(path: Path, draws: random.Random) -> None:
    """Leave only a part of a file."""
    os.truncate(path, draws.randrange(path.stat().st_size))


def _flip(path: Path, draws: random.Random) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
    path.write_bytes(data)


def _make_room(site: Site) -> None:
    """Remove what has filled the disk."""
    (site.folder / "filler").unlink()


def _restore_shard(site: Site) -> None:
    """Put back the shard that was taken away."""
    for path in (site.folder / "shards" / "train").glob("*.away"):
        path.rename(path.with_suffix(".tar"))


def _mend_shim(site: Site) -> None:
    """Let clock and disk be right again."""
    site.control(0, broken_disk=False)


def _mend_cables(site: Site) -> None:
    """Plug in the cables of all hosts."""
    assert isinstance(site, SiteOnHosts)
    site.mend()


def _damaged(damage: Damage) -> Kind:
    """Return the kind that kills a run, and damages its newest checkpoint."""
    return Kind(
        trials={ONE: 30, REPLICAS: 8, BOTH: 3},
        codes=(KILLED,),
        strike=_kill,
        first=8,  # the newest checkpoint has one before it
        afterwards=damage,
        resumed="damaged.*trying the one before",
    )


KINDS: Dict[str, Kind] = {
    "run killed": Kind(
        trials={ONE: 60, REPLICAS: 20, BOTH: 8},
        codes=(KILLED,),
        strike=_kill,
        first=0,
    ),
    "rank killed": Kind(
        trials={REPLICAS: 36, BOTH: 10},
        codes=(1,),
        strike=_signal_rank(signal.SIGKILL, r"rank {rank} \(host .*\) was killed"),
    ),
    "run told to stop": Kind(
        trials={ONE: 40, REPLICAS: 18, BOTH: 5},
        codes=(75,),
        strike=_tell_to_stop,
        said=r"SIGTERM: .*finish",
    ),
    "rank stopped": Kind(
        trials={REPLICAS: 24, BOTH: 6},
        codes=(1,),
        strike=_signal_rank(signal.SIGSTOP, r"rank {rank} has said nothing for \d+ s"),
    ),
    "link cut": Kind(
        trials={REPLICAS: 24, THREE: 6},
        codes=(1,),
        strike=_on_hosts(hosts.cut),
        mend=_mend_cables,
        hosts=True,
    ),
    "link cut for a moment": Kind(
        trials={REPLICAS: 19, THREE: 3},
        codes=(0,),
        strike=_on_hosts(hosts.cut_for_a_moment),
        last=STEPS - 6,
        hosts=True,
    ),
    "host slow": Kind(
        trials={REPLICAS: 22, THREE: 4},
        codes=(0,),
        strike=_on_hosts(hosts.slow_down),
        last=STEPS - 6,
        hosts=True,
    ),
    "link slow": Kind(
        trials={REPLICAS: 12, THREE: 2},
        codes=(0,),
        strike=_on_hosts(hosts.slow_cable),
        last=STEPS - 6,
        hosts=True,
    ),
    "disk full": Kind(
        trials={ONE: 16, REPLICAS: 5},
        codes=(1,),
        strike=_fill_disk,
        said="No space left on device",
        last=STEPS - 6,
        mend=_make_room,
        disk=True,
    ),
    "disk fails": Kind(
        trials={ONE: 16, REPLICAS: 5},
        codes=(1,),
        strike=_break_disk,
        said="Input/output error",
        last=STEPS - 6,
        mend=_mend_shim,
        shim=True,
    ),
    "checkpoint truncated": _damaged(_cut_short),
    "checkpoint's bit flipped": _damaged(_flip),
    "clock jumps": Kind(
        trials={ONE: 12, REPLICAS: 4, BOTH: 2},
        codes=(0,),
        strike=_jump,
        first=0,
        mend=_mend_shim,
        shim=True,
    ),
    "worker killed": Kind(
        trials={ONE: 22},
        codes=(1,),
        strike=_kill_worker,
        said="worker",
        overrides=("data.workers=1",),
    ),
    "shard deleted": Kind(
        trials={ONE: 17},
        codes=(2,),
        strike=_delete_shard,
        last=STEPS - 8,
        mend=_restore_shard,
        shards=True,
    ),
}


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a file system of its own at a `folder`, which a run fills; root alone can do so."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        shutil.rmtree(folder, ignore_errors=True)

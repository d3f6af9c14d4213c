"""The link between two processes of this host, for a run of one process."""

from __future__ import annotations

import datetime
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from typing import List, Optional

from parallel import parent_death
from parallel.costs import Link
from parallel.parent_death import die_with_parent

_REPETITIONS = 5
_PATIENCE = datetime.timedelta(seconds=60)


def measure() -> Optional[List[Link]]:
    """Measure the cost of a message between two processes of this host, several times.

    Returns:
        The cost in each repetition; None where the processes cannot connect.
    """
    context = parent_death.context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, context) as pool:
        store = os.path.join(folder, "store")
        by_rank = pool.map(_measure, [store, store], [0, 1])
        try:
            # Both ranks return the same.
            return next(by_rank)
        except RuntimeError:
            return None


def _measure(store: str, rank: int) -> List[Link]:
    """Measure by gloo, as the replicas of a run would send.

    Args:
        store: path of a file by which the two processes find each other.
        rank: of this one.
    """
    die_with_parent()
    # If they cannot connect, the caller prints so: gloo's own lines are dropped.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    import torch
    from torch import distributed

    from parallel import probe

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=_PATIENCE,
    )
    links = [probe.measure(None, torch.device("cpu")) for _ in range(_REPETITIONS)]
    distributed.destroy_process_group()
    return links

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
    """Cost of a message between two processes of this host, several times; None where they cannot connect."""
    context = parent_death.context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, context) as pool:
        try:
            return next(pool.map(_measure, [os.path.join(folder, "store")] * 2, range(2)))
        except RuntimeError:
            return None


def _measure(store: str, rank: int) -> List[Link]:
    """Measure by gloo, as the replicas of a run would."""
    die_with_parent()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # if they cannot connect, the caller says so
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    import torch
    from torch import distributed

    from parallel import probe

    torch.set_num_threads(1)
    group = distributed.FileStore(store, 2)
    distributed.init_process_group("gloo", store=group, rank=rank, world_size=2, timeout=_PATIENCE)
    found = [probe.measure(None, torch.device("cpu")) for _ in range(_REPETITIONS)]
    distributed.destroy_process_group()
    return found

"""The link between two processes of this host, for a run of one process."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import tempfile
from multiprocessing.connection import Connection
from typing import List, Optional

from parallel.costs import Link
from parallel.parent_death import die_with_parent

_REPETITIONS = 5
_PATIENCE = 60.0  # seconds, in which two processes also load torch


def measure() -> Optional[List[Link]]:
    """Cost of a message between two processes of this host, several times; None where they cannot connect."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with receiver, tempfile.TemporaryDirectory() as folder:
        arguments = [(os.path.join(folder, "store"), rank, sender) for rank in range(2)]
        processes = [context.Process(target=_process, args=each, daemon=True) for each in arguments]
        try:
            for process in processes:
                process.start()
            sender.close()
            return receiver.recv() if receiver.poll(_PATIENCE) else None
        except EOFError:  # both have ended
            return None
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _process(store: str, rank: int, sender: Connection) -> None:
    """Measure by gloo, as the replicas of a run would."""
    die_with_parent()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # if they cannot connect, the caller says so
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    import torch
    from torch import distributed

    from parallel import probe

    torch.set_num_threads(1)
    limit, group = datetime.timedelta(seconds=_PATIENCE), distributed.FileStore(store, 2)
    distributed.init_process_group("gloo", store=group, rank=rank, world_size=2, timeout=limit)
    found = [probe.measure(None, torch.device("cpu")) for _ in range(_REPETITIONS)]
    if rank == 0:
        sender.send(found)
    distributed.destroy_process_group()

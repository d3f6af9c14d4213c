"""The link between two processes of this host, of a single process: python -m tools.diagnosis.loopback FILE RANK

Both connect through FILE and measure by gloo as the replicas of a run would; rank 0 prints the links as JSON.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import List, Optional

from parallel.costs import Link
from parallel.parent_death import bound_to_parent

ROOT = Path(__file__).resolve().parent.parent.parent
_REPETITIONS = 5
_PATIENCE = 60.0  # seconds, in which two processes also load torch


def measure() -> Optional[List[Link]]:
    """Cost of a message between two processes of this host, several times; None where they cannot connect."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": _loopback()}
        processes = [
            subprocess.Popen(
                bound_to_parent(
                    [sys.executable, "-m", "tools.diagnosis.loopback", os.path.join(folder, "store"), str(rank)]
                ),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            for rank in range(2)
        ]
        try:
            printed = [process.communicate(timeout=_PATIENCE)[0] for process in processes]
        except subprocess.TimeoutExpired:
            return None
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(process.returncode for process in processes):
            return None
        return [Link(*link) for link in json.loads(printed[0])]


def _loopback() -> str:
    return "lo" if sys.platform == "linux" else "lo0"


def main(file: str, rank: int) -> None:
    """One of the two processes."""
    import torch
    from torch import distributed

    from parallel import probe

    torch.set_num_threads(1)
    store = distributed.FileStore(file, 2)
    limit = datetime.timedelta(seconds=_PATIENCE)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    found = [probe.measure(None, torch.device("cpu")) for _ in range(_REPETITIONS)]
    distributed.destroy_process_group()
    if rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

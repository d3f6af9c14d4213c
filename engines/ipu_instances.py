"""The instances of a run on IPUs: the processes that poprun starts, each of which serves replicas.

Gradients are exchanged between IPUs. The hosts exchange small objects by Horovod's `allgather`,
which all its versions have.
"""

from __future__ import annotations

import pickle
from typing import Any, List, Optional

import torch

from parallel.processes import Processes
from parallel.topology import Topology


class Instances(Processes):
    """The processes of a run, connected by Horovod; without groups of torch."""

    def __init__(self, topology: Topology):
        """Join the other instances; every one must make this call.

        Args:
            topology: this process's place in the run.
        """
        import horovod.torch

        self.topology = topology
        self._horovod = horovod.torch
        self._horovod.init()

    def gather(self, value: Any) -> List[Any]:
        """Return each process's `value`, by rank."""
        # Messages differ in size, which all must know to divide what they receive.
        content = bytearray(pickle.dumps(value))
        message = torch.frombuffer(content, dtype=torch.uint8)
        sizes = self._horovod.allgather(torch.tensor([len(message)])).tolist()
        parts = self._horovod.allgather(message).split(sizes)
        return [pickle.loads(part.numpy().tobytes()) for part in parts]

    def gather_to_main(self, value: Any, ranks: Optional[range] = None) -> List[Any]:
        """Return the `value` of each of some `ranks` on the main process, elsewhere []."""
        ranks = ranks or range(self.topology.world)
        values = self.gather(value if self.topology.rank in ranks else None)
        if not self.topology.is_main:
            return []
        return [values[rank] for rank in ranks]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums of `values` over processes."""
        # Added in the order of the ranks, so that all have the same bits.
        return torch.stack(self.gather(values)).sum(0)

    def agree_late(self, value: int) -> int:
        """Return the largest `value` of all processes, already at this call."""
        return max(self.gather(value))

    def wait_for_all(self) -> None:
        self.gather(None)

    def part(self) -> None:
        self.wait_for_all()

    def _broadcast(self, value: Any) -> Any:
        return self.gather(value if self.topology.is_main else None)[0]

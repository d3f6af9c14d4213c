"""The instances of a run on IPUs: the processes that poprun starts, each of which serves some replicas.

Gradients travel between IPUs without the hosts. The hosts exchange small objects by Horovod's `allgather`, which all of
its versions have.
"""

from __future__ import annotations

import pickle
from typing import Any, List, Optional

import torch

from parallel.agreement import Agreement
from parallel.topology import Topology


class Instances(Agreement):
    """The counterpart of parallel.processes.Processes for the instances of poprun."""

    def __init__(self, topology: Topology):
        """Join the other instances; every one must make this call."""
        import horovod.torch

        self.topology = topology
        self._horovod = horovod.torch
        self._horovod.init()

    def gather(self, value: Any) -> List[Any]:
        message = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self._horovod.allgather(torch.tensor([len(message)])).tolist()
        parts = self._horovod.allgather(message).split(sizes)
        return [pickle.loads(part.numpy().tobytes()) for part in parts]

    def gather_to_main(self, value: Any, ranks: Optional[range] = None) -> List[Any]:
        """`value` of each of `ranks` (of all, if None), in their order, on the main instance; elsewhere nothing."""
        values = self.gather(value if ranks is None or self.topology.rank in ranks else None)
        if not self.topology.is_main:
            return []
        return values if ranks is None else [values[rank] for rank in ranks]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of `values` over all instances, with the same bits on each."""
        return torch.stack(self.gather(values)).sum(0)

    def agree(self, value: int) -> int:
        """The largest `value` of all instances, the same on each."""
        return max(self.gather(value))

    def wait_for_all(self) -> None:
        """Returns once every instance has called it."""
        self.gather(None)

    def part(self) -> None:
        """The end of a run in which nothing failed."""
        self.wait_for_all()

    def _broadcast(self, value: Any) -> Any:
        return self.gather(value if self.topology.is_main else None)[0]

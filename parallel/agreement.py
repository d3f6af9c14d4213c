"""Decisions that processes make together, whatever connects them: one for all of them, or all or none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Callable, List, Optional, TypeVar

import torch

from parallel.topology import Topology
from recipe.errors import UserError

Result = TypeVar("Result")


class Agreement(ABC):
    """All processes of a run, as one of them sees them."""

    topology: Topology

    @abstractmethod
    def gather(self, value: Any) -> List[Any]:
        """`value` of every process, in their order, on every process; small picklable objects."""

    @abstractmethod
    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of `values` over all processes, on every one."""

    @abstractmethod
    def gather_to_main(self, value: Any, ranks: Optional[range] = None) -> List[Any]:
        """`value` of each of `ranks` (of all, if None), in their order, on the main process; elsewhere []."""

    @abstractmethod
    def agree(self, value: int) -> int:
        """The largest `value` of all processes, the same on each; it may be that of the call before."""

    @abstractmethod
    def wait_for_all(self) -> None:
        """Return once every process has called it."""

    @abstractmethod
    def part(self) -> None:
        """End a run in which nothing failed: wait for the others, and release what connects them."""

    @abstractmethod
    def _broadcast(self, value: Any) -> Any:
        """The main process's `value`, on every process."""

    def from_main(self, function: Callable[[], Result]) -> Result:
        """Result of `function` on the main process, on every process. Its error is raised on all, with a message on the
        main process only."""
        return self._broadcast(self.together(lambda: function() if self.topology.is_main else None))

    def together(self, function: Callable[[], Result]) -> Result:
        """Result of `function` on this process. If it fails on any, all raise; only the first error has a message."""
        result, failure = None, None
        try:
            result = function()
        except UserError as error:
            failure = error
        failed = [rank for rank, fault in enumerate(self.gather(failure is not None)) if fault]
        if failed:
            raise failure if failure is not None and failed[0] == self.topology.rank else UserError("")
        return result

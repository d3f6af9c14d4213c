"""The processes of a run: the groups they form, and the small objects that they send each other.

Tensors travel in the groups (`parallel/pipeline.py`, `parallel/reduce.py`). A run of one process
uses the same functions, which then send nothing.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Sequence, Tuple, TypeVar

import torch
import torch.distributed as dist

from common.errors import DONE, MachineError, OneLineError, UserError
from parallel import groups
from parallel.groups import Group
from parallel.joining import COLLECTIVE_TIMEOUT, join
from parallel.topology import Topology
from parallel.watch import Watch

if TYPE_CHECKING:
    from parallel.elastic import Elastic

SILENCE_SECONDS = 300.0  # `parallel.silence` unless the recipe says otherwise

# Errors on which all processes agree, by exit code.
_FAILURES = {error.code: error for error in (UserError, MachineError)}

Result = TypeVar("Result")  # of a function, or what processes send each other


class Processes:
    """All processes of a run, as one of them sees them.

    Unless it says otherwise, every process calls a method.

    topology: this process's place among them.
    stage_group: the processes that share this one's replica, ordered by stage.
    replica_group: those that compute this one's stage, ordered by replica.
    host_stage_group: as stage_group, for tensors on the CPU.
    elastic: this process's part in an elastic run; None in others.

    Each group is None in a run of one process. Subclasses connect processes by other means.
    """

    elastic: Optional[Elastic] = None

    def __init__(
        self,
        topology: Topology,
        device: torch.device,
        silence: float = SILENCE_SECONDS,
        elastic: Optional[Elastic] = None,
    ):
        """Meet the other processes.

        Args:
            topology: of this process.
            device: of its tensors.
            silence: seconds without a heartbeat after which a rank counts as lost.
            elastic: what then ends this generation of processes; None ends the process.

        Raises:
            ConfigError: the master's address is missing, or the ranks do not meet in time.
            MachineError: ranks that our launcher has started do not meet in time.
        """
        self.topology = topology
        self.stage_group: Group = None
        self.replica_group: Group = None
        self.host_stage_group: Group = None
        self._host: Group = None  # all processes, for tensors on the CPU
        self.elastic = elastic
        self._world = topology.world
        self._pending: Optional[Tuple[dist.Work, torch.Tensor]] = None  # of `agree_late`
        if self._world == 1:
            return
        # In an elastic run a process may be lost while they connect.
        limit = contextlib.nullcontext() if elastic is None else elastic.meeting()
        with limit:
            self._meet(device, silence)

    def _meet(self, device: torch.device, silence: float) -> None:
        """Join the other processes and form groups with them."""
        # Requires a newer torch than a single process does.
        from torch.distributed.device_mesh import init_device_mesh

        generation = 0 if self.elastic is None else self.elastic.number
        join(self.topology, device, generation)
        # Groups of replicas and of stages, for tensors on the device and on the host.
        names = ("replica", "stage")
        shape = (self.topology.replicas, self.topology.stages)
        host = init_device_mesh("cpu", shape, mesh_dim_names=names)
        mesh = host
        if device.type != "cpu":
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        self.replica_group = mesh.get_group("replica")
        self.stage_group = mesh.get_group("stage")
        self.host_stage_group = host.get_group("stage")
        # For small objects and decisions, on the host: by NCCL they would wait for the device.
        self._host = groups.new_group(timeout=COLLECTIVE_TIMEOUT, backend="gloo")
        self._watch = Watch(self.topology, silence, self.elastic)
        # All watch once all are here. Until then they need the store, which ends with rank 0.
        self.wait_for_all()

    def gather(self, value: Any) -> List[Any]:
        """Return the `value` of every process, a small picklable object, in their order."""
        values = [value] * self._world
        if self._world > 1:
            dist.all_gather_object(values, value, group=self._host)
        return values

    def gather_to_main(self, value: Result, ranks: Optional[range] = None) -> List[Result]:
        """Gather objects on the main process.

        Args:
            value: of this process; a small picklable object.
            ranks: whose values are gathered; None: all.

        Returns:
            The values of the ranks, in their order, on the main process; elsewhere [].
        """
        if ranks is None:
            ranks = range(self._world)
        if self.topology.is_main:
            return [value if rank == 0 else self._receive(rank) for rank in ranks]
        if self.topology.rank in ranks:
            dist.send_object_list([value], group_dst=0, group=self._host)
        return []

    def pass_on(self, value: Result, source: int, receivers: Sequence[int]) -> Result:
        """Send an object from one process to some. Others need not call.

        Args:
            value: of this process; a small picklable object.
            source: rank whose value is sent.
            receivers: ranks that get it.

        Returns:
            The source's value on the receivers, elsewhere this process's own.
        """
        if self.topology.rank == source:
            for rank in receivers:
                dist.send_object_list([value], group_dst=rank, group=self._host)
        if self.topology.rank in receivers:
            return self._receive(source)
        return value

    def from_main(self, function: Callable[[], Result]) -> Result:
        """Return the result of `function` on the main process, on every process.

        Its error is raised on all, with a message on the main process only.
        """
        # What fails there fails everywhere, before anybody waits for the result.
        result = self.together(lambda: function() if self.topology.is_main else None)
        return self._broadcast(result)

    def together(self, function: Callable[[], Result]) -> Result:
        """Return the result of `function` on this process.

        Raises:
            UserError, MachineError: `function` has failed so on any process; only the first error
                has a message, and all are of its class.
        """
        # All learn of a failure, and all fail, so that none waits for another.
        try:
            result = function()
        except OneLineError as error:
            first, code = self._first_failure(error.code)
            if first == self.topology.rank:
                raise
            raise _FAILURES[code]("") from None
        _, code = self._first_failure(DONE)
        if code != DONE:
            raise _FAILURES[code]("")
        return result

    def _first_failure(self, code: int) -> Tuple[int, int]:
        """Return the first process that has failed, and its exit code; of process 0 if none has.

        Args:
            code: of this process; DONE if it has not failed.
        """
        codes = self.gather(code)
        first = next((rank for rank, code in enumerate(codes) if code != DONE), 0)
        return first, codes[first]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Add up `values` over all processes, in place, on the device, and return them.

        Nothing waits on the host.
        """
        if self._world > 1:
            dist.all_reduce(values)
        return values

    def sum_over_stages(self, values: torch.Tensor) -> torch.Tensor:
        """Add up `values` over the stages of this replica, in place, and return them."""
        if self.topology.stages > 1:
            dist.all_reduce(values, group=self.stage_group)
        return values

    def sum_over_replicas(self, values: torch.Tensor) -> None:
        """Add up `values` over the replicas, in place; the same bits on all."""
        if self.topology.replicas > 1:
            dist.all_reduce(values, group=self.replica_group)

    def agree_late(self, value: int) -> int:
        """Return the largest `value` that any process gave at the call before this one.

        No process waits for the slowest: its value has had a step's time to come.
        """
        if self._world == 1:
            return value
        # Its message was sent a step ago, so that this rarely waits.
        before = self._agreed()
        largest = torch.tensor([value])
        work = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._host, async_op=True)
        self._pending = (groups.begun(work), largest)
        return before

    def check(self) -> None:
        """Check that the generation goes on.

        Raises Regroup in an elastic run whose generation is over.
        """
        if self.elastic is not None:
            self.elastic.check()

    def wait_for_all(self) -> None:
        """Return once every process has called this."""
        if self._world > 1:
            dist.barrier(group=self._host)

    def part(self) -> None:
        """End a run without a fault: wait for the others, and release what connects them."""
        if self._world == 1 or not dist.is_initialized():
            return
        # A process that ended first would look like one that is lost.
        self._agreed()
        self.wait_for_all()
        self._watch.end()
        dist.destroy_process_group()

    def further_group(self) -> Group:
        """Create a group of all ranks that nothing else uses, on the device.

        A run of one process has None.
        """
        if self._world == 1:
            return None
        return groups.new_group(timeout=COLLECTIVE_TIMEOUT)

    def further_replica_group(self) -> Group:
        """Create a group as `replica_group` for a second thread: two must not share one.

        A run of one process has None.
        """
        if self._world == 1:
            return None
        ranks = dist.get_process_group_ranks(self.replica_group)
        return groups.new_group(timeout=COLLECTIVE_TIMEOUT, ranks=ranks)

    def _receive(self, rank: int) -> Any:
        """Return the object that a rank sends."""
        values: List[Any] = [None]
        dist.recv_object_list(values, group_src=rank, group=self._host)
        return values[0]

    def _broadcast(self, value: Any) -> Any:
        """Return the main process's object."""
        values = [value]
        if self._world > 1:
            dist.broadcast_object_list(values, group_src=0, group=self._host)
        return values[0]

    def _agreed(self) -> int:
        """Return the result of the last call of `agree_late`, 0 before the first."""
        if self._pending is None:
            return 0
        work, largest = self._pending
        work.wait()
        self._pending = None
        return int(largest)

"""The processes of a run: how they meet, the groups they form, and the small objects that they send each other.

Tensors travel in the groups (`parallel/pipeline.py`, `parallel/reduce.py`). A run of one process uses the same
functions, which then send nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Sequence, Tuple, TypeVar

import torch
import torch.distributed as dist

from parallel.topology import Topology
from recipe.errors import ConfigError, UserError

if TYPE_CHECKING:
    from parallel.elastic import Elastic

_RENDEZVOUS_SECONDS = 50.0  # for all ranks to find the master
_SILENT_SECONDS = 10.0  # until a rank says whom it waits for
_NAMED = 8  # ranks that such a line names at most
_COLLECTIVE = timedelta(hours=1)  # a rank may save, evaluate or compile while the others wait
SILENCE_SECONDS = 300.0  # `parallel.silence` unless the recipe says otherwise
_HEARTBEAT_SECONDS = 5.0
_ALIVE, _DONE = 1, 0
_STAGES = "stages/"  # of a rank's key in the store by which all meet
_quiet_code: Optional[int] = None  # see leave_quietly
_last_word = threading.Lock()
_LOST_PEER = ("gloo/transport", "NCCL error", "ncclRemoteError", "ncclSystemError")

Result = TypeVar("Result")


class Processes:
    """All processes of a run, as one of them sees them. Unless it says otherwise, every process calls a method.

    stage_group: the processes that share this one's replica, ordered by stage. replica_group: those that compute
    this one's stage, ordered by replica. host_stage_group: as stage_group, for tensors on the CPU. Each is None
    in a run of one process. Subclasses connect processes by other means.
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

        Args: silence: seconds without a heartbeat after which a rank counts as lost. elastic: what then ends this
        generation of processes; None ends the process.

        Raises ConfigError: the master's address is missing, or the ranks do not meet in time.
        """
        self.topology = topology
        self.stage_group = self.replica_group = self.host_stage_group = None
        self._pending: Optional[tuple] = None
        self._world, self.elastic = topology.world, elastic
        if self._world == 1:
            return
        with contextlib.nullcontext() if elastic is None else elastic.meeting():
            self._meet(device, silence)

    def _meet(self, device: torch.device, silence: float) -> None:
        from torch.distributed.device_mesh import init_device_mesh  # requires a newer torch than a single process does

        topology = self.topology
        _join(topology, device, 0 if self.elastic is None else self.elastic.number)
        names, shape = ("replica", "stage"), (topology.replicas, topology.stages)
        host = init_device_mesh("cpu", shape, mesh_dim_names=names)
        mesh = host if device.type == "cpu" else init_device_mesh(device.type, shape, mesh_dim_names=names)
        self.replica_group, self.stage_group = mesh.get_group("replica"), mesh.get_group("stage")
        self.host_stage_group = host.get_group("stage")
        self._host = dist.new_group(backend="gloo", timeout=_COLLECTIVE)
        self._watch = _Watch(topology, silence, self.elastic)
        self.wait_for_all()  # all watch by now; until they do they need the store, which ends with rank 0

    def gather(self, value: Any) -> List[Any]:
        """`value` of every process, in their order, on every process; small picklable objects."""
        values: List[Any] = [value] * self._world
        if self._world > 1:
            dist.all_gather_object(values, value, group=self._host)
        return values

    def gather_to_main(self, value: Any, ranks: Optional[range] = None) -> List[Any]:
        """`value` of each of `ranks` (None: of all), in their order, on the main process; elsewhere []."""
        ranks = range(self._world) if ranks is None else ranks
        if self.topology.is_main:
            return [value if rank == 0 else self._receive(rank) for rank in ranks]
        if self.topology.rank in ranks:
            dist.send_object_list([value], group_dst=0, group=self._host)
        return []

    def pass_on(self, value: Any, source: int, receivers: Sequence[int]) -> Any:
        """`value` of process `source` on the `receivers`, elsewhere this process' own. Others need not call."""
        if self.topology.rank == source:
            for rank in receivers:
                dist.send_object_list([value], group_dst=rank, group=self._host)
        return self._receive(source) if self.topology.rank in receivers else value

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

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of `values` over all processes, in place, on the device; nothing waits on the host."""
        if self._world > 1:
            dist.all_reduce(values)
        return values

    def sum_over_stages(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of `values` over the stages of this replica, in place, on the device."""
        if self.topology.stages > 1:
            dist.all_reduce(values, group=self.stage_group)
        return values

    def sum_over_replicas(self, values: torch.Tensor) -> None:
        """Add up a tensor over the replicas, in place; the same bits on all."""
        if self.topology.replicas > 1:
            dist.all_reduce(values, group=self.replica_group)

    def agree(self, value: int) -> int:
        """The largest `value` that any process gave at the call before this one: none waits for the slowest."""
        if self._world == 1:
            return value
        before = self._agreed()
        largest = torch.tensor([value])
        self._pending = (dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._host, async_op=True), largest)
        return before

    def check(self) -> None:
        """Raises Regroup in an elastic run whose generation is over."""
        if self.elastic is not None:
            self.elastic.check()

    def wait_for_all(self) -> None:
        """Return once every process has called this."""
        if self._world > 1:
            dist.barrier(group=self._host)

    def part(self) -> None:
        """End a run in which nothing failed: wait for the others, and release what connects them."""
        if self._world == 1 or not dist.is_initialized():
            return
        self._agreed()
        self.wait_for_all()
        self._watch.end()
        dist.destroy_process_group()

    def further_group(self) -> Optional[dist.ProcessGroup]:
        """A group of all ranks that nothing else uses, on the device; None in a run of one process."""
        return dist.new_group(timeout=_COLLECTIVE) if self._world > 1 else None

    def further_replica_group(self) -> Optional[dist.ProcessGroup]:
        """A group as `replica_group`, for a second thread: two must not share one."""
        if self._world == 1:
            return None
        ranks = dist.get_process_group_ranks(self.replica_group)
        return dist.new_group(ranks, timeout=_COLLECTIVE, use_local_synchronization=True)

    def _receive(self, rank: int) -> Any:
        values: List[Any] = [None]
        dist.recv_object_list(values, group_src=rank, group=self._host)
        return values[0]

    def _broadcast(self, value: Any) -> Any:
        values = [value]
        if self._world > 1:
            dist.broadcast_object_list(values, group_src=0, group=self._host)
        return values[0]

    def _agreed(self) -> int:
        if self._pending is None:
            return 0
        work, largest = self._pending
        work.wait()
        self._pending = None
        return int(largest)


class _Watch:
    """Ends this process at once when another is gone, whatever this one waits for (1711.04325 ran on MPI_Abort).

    One thread sends a heartbeat to the rank after this one every few seconds, another listens to the rank before it.
    If that one dies, the connection breaks; if it is stopped or hangs, or its host loses power, the heartbeats end.
    This rank then exits too, so the failure propagates to all ranks. NCCL would wait for ever.
    """

    def __init__(self, topology: Topology, silence: float, elastic: Optional[Elastic]):
        self._elastic = elastic
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_RENDEZVOUS_SECONDS))
        self._before = (topology.rank - 1) % topology.world
        self._after = (topology.rank + 1) % topology.world
        self._name, self._silence = describe(topology), silence
        self._done = threading.Event()
        tasks = (self._speak, self._listen)
        self._threads = [threading.Thread(target=task, name="watch", daemon=True) for task in tasks]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """End the watch without a fault; every rank must call."""
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _speak(self) -> None:
        # The receiver is gone, which this rank learns by the one before it, or this generation is, with its groups.
        with contextlib.suppress(RuntimeError, ValueError):
            while not self._done.wait(min(_HEARTBEAT_SECONDS, self._silence / 4)):
                dist.send(torch.tensor([_ALIVE]), self._after, group=self._group)
            dist.send(torch.tensor([_DONE]), self._after, group=self._group)

    def _listen(self) -> None:
        heartbeat, since = torch.tensor([_ALIVE]), time.monotonic()
        try:
            while heartbeat.item() == _ALIVE:
                since = time.monotonic()
                dist.irecv(heartbeat, self._before, group=self._group).wait(timedelta(seconds=self._silence))
        except RuntimeError:
            if self._elastic is not None:
                self._elastic.lost()
                return
            before = f"{self._name}: rank {self._before}"
            if time.monotonic() - since > 0.9 * self._silence:
                fault = f"has said nothing for {self._silence:g} s: it is stopped or hangs, or its host is gone"
                leave(f"{before} {fault}; leaving")
            time.sleep(1.0)  # a rank that fails by itself prints its reason first
            if _quiet_code is not None:
                leave("", _quiet_code)
            leave(f"{before} is gone; leaving")


def describe(topology: Topology) -> str:
    """`rank 3 (replica 1, stage 1)`."""
    return f"rank {topology.rank} (replica {topology.replica}, stage {topology.stage})"


def connected() -> bool:
    """Whether this process is one of several ranks that have met and not yet parted."""
    return dist.is_available() and dist.is_initialized()


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error only says that another process, or the way to it, is gone."""
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in _LOST_PEER)


def leave_if_peer_lost(error: BaseException, code: int) -> None:
    """End this process if an error only says that another one, or the way to it, is gone."""
    if is_lost_peer(error):
        time.sleep(1.0)  # that one prints its reason first
        leave(f"rank {dist.get_rank()}: lost another rank; leaving", code)


def leave_quietly(code: int) -> None:
    """This process is about to end with `code`, and another prints why: that one's end is not reported."""
    global _quiet_code
    _quiet_code = code


def leave(message: str, code: int = 1) -> None:
    """End this process without cleaning up, which would wait for ranks that are gone."""
    _last_word.acquire()  # two threads may find at the same moment that a rank is gone: one prints
    if message:
        print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


def _join(topology: Topology, device: torch.device, generation: int) -> None:
    """Initialise torch.distributed, with the time limits and the messages of this program."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        fault = "MASTER_ADDR and MASTER_PORT must name the host and a free port where the ranks meet"
        raise ConfigError(f"{fault}; start by ./run_pod.sh, or set them")
    try:
        store, stages = _meet(topology, (host, int(port)), generation)
    except (OSError, RuntimeError) as error:
        first = getattr(error, "strerror", None) or str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{describe(topology)} did not meet all {topology.world} ranks at {host}:{port} within "
            f"{_RENDEZVOUS_SECONDS:.0f} s ({first}); check that all were started and that the address is right"
        ) from None
    other = next((rank for rank in range(topology.world) if stages[rank] != stages[0]), None)
    if other is not None:  # they would form other groups, and wait for each other
        text = f"rank {other} has parallel.stages {stages[other]}, rank 0 {stages[0]}; give all hosts the same recipe"
        raise ConfigError(text if topology.is_main else "")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store.set_timeout(_COLLECTIVE)
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    dist.init_process_group(backend, store=store, rank=topology.rank, world_size=topology.world, timeout=_COLLECTIVE)


def _meet(topology: Topology, place: Tuple[str, int], generation: int) -> Tuple[dist.Store, List[int]]:
    """The store that all ranks have reached, and `parallel.stages` of each. Raises OSError or RuntimeError."""
    from torch.distributed.elastic.utils.store import synchronize

    serves = topology.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    end = time.monotonic() + _RENDEZVOUS_SECONDS
    limit = timedelta(seconds=_RENDEZVOUS_SECONDS)
    prefix = f"ranks/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{generation}"
    timer = threading.Timer(_SILENT_SECONDS, _say_who_is_missing, (topology, place, prefix, end))
    timer.daemon = True
    timer.start()
    try:
        while not serves:  # torch's store would print each failed attempt at length
            try:
                socket.create_connection(place, timeout=1.0).close()
                break
            except OSError:
                if time.monotonic() > end:
                    raise
            time.sleep(0.2)
        shared = dist.TCPStore(*place, None, serves, limit, wait_for_workers=False)
        store = dist.PrefixStore(prefix, shared)
        own = str(topology.stages).encode()
        texts = synchronize(store, own, topology.rank, topology.world, _STAGES, _RENDEZVOUS_SECONDS)
    finally:
        timer.cancel()
    return store, [int(text) for text in texts]


def _say_who_is_missing(topology: Topology, place: Tuple[str, int], prefix: str, end: float) -> None:
    """Print whom this rank waits for, where, and until when: a rank that does not find the store, or the main one.

    Called in a thread with a connection of its own, as the store's is taken by the wait.
    """
    left = end - time.monotonic()
    until = f"until {time.strftime('%H:%M:%S', time.localtime(time.time() + left))}, for another {left:.0f} s"
    where = f"at {place[0]}:{place[1]} {until}"
    try:
        socket.create_connection(place, timeout=1.0).close()
    except OSError:
        print(f"{describe(topology)}: waiting for rank 0 to listen {where}", file=sys.stderr, flush=True)
        return
    if not topology.is_main:
        return
    with contextlib.suppress(RuntimeError):  # the store has ended: the wait for it, too, and it says why
        limit = timedelta(seconds=_SILENT_SECONDS)
        store = dist.PrefixStore(prefix, dist.TCPStore(*place, None, False, limit, wait_for_workers=False))
        missing = [rank for rank in range(topology.world) if not store.check([f"{_STAGES}{rank}"])]
        if not missing:
            return
        here = topology.world - len(missing)
        names = ", ".join(map(str, missing[:_NAMED])) + (" ..." if len(missing) > _NAMED else "")
        started = f"{here} of {topology.world} ranks {'is' if here == 1 else 'are'} here"
        whom = f"{'rank' if len(missing) == 1 else 'ranks'} {names}"
        print(f"{describe(topology)}: {started}; waiting for {whom} {where}", file=sys.stderr, flush=True)

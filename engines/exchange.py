"""What becomes of a replica's gradients between its last backward pass and the update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable, Dict, Iterator, List, Optional

import torch
import torch.distributed as dist

from engines.devices import DTYPES
from optim.half_weights import WeightState
from parallel.processes import Processes
from recipe.config import Recipe
from recipe.division import Batch
from recipe.errors import UserError

if TYPE_CHECKING:
    from parallel.reduce import Exchange
    from parallel.sparse_exchange import SparseExchange


class GradientExchange:
    """Puts the gradient of the whole batch in the place of the replica's own; as late as `exchange.delay` says.

    arm: to be called before the last backward pass of a step where the exchange can begin within it; else None.
    """

    def __init__(
        self, weights: WeightState, recipe: Recipe, batch: Batch, processes: Processes, steps_per_epoch: Optional[int]
    ):
        """
        Args:
            steps_per_epoch: for the densities by epoch; None for an engine that does not train.
        """
        self._weights, self._processes = weights, processes
        self._buffer = weights.gradients.flat
        section = recipe.exchange
        alone = processes.topology.replicas == 1
        # The exchange of a late gradient runs in a thread of its own.
        group = None if alone else processes.further_replica_group() if section.delay else processes.replica_group
        self._dense: Optional[Exchange] = None
        self._sparse: Optional[SparseExchange] = None
        if section.sparse:
            self._sparse = _create_sparse(weights, recipe, processes, group, steps_per_epoch)
        elif not alone:
            self._dense = _create_dense(weights, recipe, batch, group)
        self._delay = None
        self.arm: Optional[Callable[[], None]] = None
        if section.delay:
            from engines.delay import Delay

            self._delay = Delay(self._buffer, section.delay, None if alone and self._sparse is None else self._run)
        elif self._dense is not None and self._dense.overlaps:
            self.arm = self._dense.arm
        self._summed = batch.accumulation if section.method == "none" else batch.micro_batches

    def __call__(self, step: int, scale: torch.Tensor) -> Optional[torch.Tensor]:
        """Exchanges the gradient of update `step`, from 0, that lies in the weights' buffer.

        Args:
            scale: float32 [], the loss scale it was computed with.

        Returns:
            What the gradient that lies in the buffer now has to be divided by, float32 []; None where no gradient is
            due yet.
        """
        divisor = scale * self._summed
        if self._delay is not None:
            return self._delay.advance(step, divisor)
        if self._sparse is not None:
            self._sparse(self._buffer, step, divisor)
        elif self._dense is not None:
            self._dense.finish()
        return divisor

    def state_dict(self) -> List[dict]:
        """Gradients that are still to be applied, oldest first; the same on all replicas."""
        entries = self._delay.state_dict() if self._delay is not None else []
        return [{**entry, "gradient": self._weights.by_name(entry["gradient"])} for entry in entries]

    def load_state_dict(self, entries: List[dict]) -> None:
        """Takes over what `state_dict` gave. Raises ValueError naming a tensor that does not fit."""
        if self._delay is None:
            if entries:
                raise ValueError(f"{len(entries)} gradients are still to be applied, but exchange.delay is 0")
            return
        flats = [self._flat(entry["gradient"]) for entry in entries]
        self._delay.load_state_dict([{**entry, "gradient": flat} for entry, flat in zip(entries, flats)])

    def replica_states(self) -> Iterator[dict]:
        """What each replica has kept for later steps: see engines/base.py."""
        if self._sparse is None:
            return
        place = self._processes.topology
        if self._delay is not None:
            self._delay.wait()
        for replica in range(place.replicas):
            ranks = range(replica * place.stages, (replica + 1) * place.stages)
            own = {}
            if place.replica == replica:
                own = {name: self._weights.by_name(flat) for name, flat in self._sparse.state().items()}
            yield _joined(self._processes.collect(own, ranks))

    def load_replica_states(self, count: int, read: Callable[[int], dict]) -> None:
        """Takes over what `count` replicas had kept: see engines/base.py.

        A replica takes the same share of the kept values as of the images: where their number changes, those of
        several are added, or those of one divided, so that the sum over replicas stays.
        """
        if self._sparse is None:
            if count:
                raise ValueError(f"{count} replicas have kept a part of their gradients; exchange.method is not sparse")
            return
        place, own = self._processes.topology, self._sparse.state()
        sums = {name: torch.zeros_like(flat) for name, flat in own.items()}
        fault = ""
        for number, state in enumerate(self._shared_out(count, read)):
            if state is None:
                continue
            share = _overlap(number, count, place.replica, place.replicas)
            try:
                for name, total in sums.items():
                    total.add_(self._flat(state.get(name, {})), alpha=share)
            except ValueError as error:
                fault = str(error)  # the others still have to be sent theirs
        fault = next(filter(None, self._processes.gather(fault)), "")
        if fault:
            raise ValueError(fault)
        for name, flat in own.items():
            flat.copy_(sums[name])

    def _shared_out(self, count: int, read: Callable[[int], dict]) -> Iterator[Optional[dict]]:
        """The state of each old replica on those ranks that take a part of it, elsewhere None.

        What `read` raises is raised on all ranks, after the last: until then ranks wait for what they are sent.
        """
        place = self._processes.topology
        failure: Optional[UserError] = None

        def given() -> dict:
            nonlocal failure
            try:
                return {} if failure else read(number)
            except UserError as error:
                failure = error
                return {}

        def complain() -> None:
            if failure is not None:
                raise failure

        for number in range(count):
            takers = [replica for replica in range(place.replicas) if _overlap(number, count, replica, place.replicas)]
            ranks = [replica * place.stages + stage for replica in takers for stage in range(place.stages)]
            state = self._processes.distribute(given, ranks)
            yield state if place.rank in ranks else None
        self._processes.from_main(complain)

    def close(self) -> None:
        """Ends what runs in the background."""
        if self._delay is not None:
            self._delay.close()

    def _run(self, buffer: torch.Tensor, step: int, divisor: torch.Tensor) -> None:
        if self._sparse is not None:
            self._sparse(buffer, step, divisor)
        else:
            self._dense.finish(buffer)

    def _flat(self, tensors: Dict[str, torch.Tensor]) -> torch.Tensor:
        """A buffer laid out as the weights are, with the tensors that belong to this stage. Raises ValueError."""
        flat = torch.zeros_like(self._buffer)
        self._weights.load_flat(flat, self._weights.own(tensors))
        return flat


def _create_dense(weights: WeightState, recipe: Recipe, batch: Batch, group: dist.ProcessGroup) -> Exchange:
    from parallel.reduce import Exchange

    section = recipe.exchange
    return Exchange(
        weights.gradients.flat,
        weights.places(),
        group,
        method=section.method,
        order="tree" if section.in_tree else "fast",
        wire=DTYPES[section.sent],
        micro_batches=batch.micro_batches,
        collect=weights.gradients.collect,
    )


def _create_sparse(
    weights: WeightState,
    recipe: Recipe,
    processes: Processes,
    group: Optional[dist.ProcessGroup],
    steps_per_epoch: Optional[int],
) -> SparseExchange:
    from parallel.sparse_exchange import Rules, SparseExchange

    section, place, buffer = recipe.exchange, processes.topology, weights.gradients.flat
    whole = [
        range(start, start + parameter.numel())
        for start, parameter in weights.places()
        if section.dense_1d and parameter.dim() == 1
    ]
    sparse = sum(parameter.numel() for _, parameter in weights.places()) - sum(len(each) for each in whole)
    return SparseExchange(
        Rules(
            pattern="gather" if section.method == "topk" else section.pattern,
            wire=DTYPES[section.sent],
            density=lambda step: section.density_at(step, steps_per_epoch),
            conserve=getattr(section, "conserve", True),
            momentum=recipe.optimizer.momentum if section.momentum_correction else None,
            masks=section.factor_masking,
            by_threshold=section.stage_share == "threshold",
        ),
        len(buffer),
        processes.gather(sparse)[: place.stages],
        place.stage,
        whole,
        group,
        processes.further_group(),
        buffer.device,
    )


def _joined(states: List[dict]) -> dict:
    """One state of those of a replica's stages: {kind: {name: tensor}}."""
    joined: Dict[str, dict] = {}
    for state in states:
        for kind, tensors in state.items():
            joined.setdefault(kind, {}).update(tensors)
    return joined


def _overlap(old: int, olds: int, new: int, news: int) -> float:
    """Share of the images of replica `old` of `olds` that replica `new` of `news` computes: replicas take a step's
    micro batches in their order, each as many as the others."""
    first, last = max(old * news, new * olds), min((old + 1) * news, (new + 1) * olds)
    return max(0, last - first) / news

"""The part of a model that a process computes: its stages, parameters and running statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Iterable, List, Mapping, Sequence, Tuple

import torch
from torch import nn

from common.errors import ConfigError
from engines import cuts, state, tuning
from engines.frozen import Frozen
from engines.stage import Stage, blocks_to_recompute
from models.base import BlockList
from models.families import build
from models.normalization import norm_parameters
from models.trained_parts import freeze, frozen_modules, trained_names
from optim.factory import hidden_layers
from parallel.processes import Processes
from recipe.distribution import Parallel
from recipe.division import Batch
from recipe.hardware import EngineSection
from recipe.network import Model


@dataclass
class ModelPart:
    """A process's part of a model, on its device.

    model: the part as one list of blocks.
    parts: modules of this process, by number of the part in the model; one, or several under the
        interleaved schedule.
    parameters, buffers: of the part, those that are trained; buffers are running statistics.
    frozen: those that are not.
    together: names of the trained parameters that get a micro batch's gradients at once, as the backward
        pass of their stage ends.
    part_names: names of the blocks of each part of the model, of all processes.
    whole_names: names of the whole model's trained parameters.
    shapes: of the whole model's parameters and persistent buffers.
    norms: result of `models.normalization.norm_parameters` for the whole model.
    hidden: result of `optim.factory.hidden_layers` for the whole model.
    memory_format: of activations.
    notes: lines for the user.
    """

    model: BlockList
    parts: Dict[int, Stage]
    parameters: Dict[str, nn.Parameter]
    buffers: Dict[str, torch.Tensor]
    frozen: Frozen
    together: List[List[str]]
    part_names: List[List[str]]
    whole_names: List[str]
    shapes: Dict[str, Tuple[int, ...]]
    norms: List[str]
    hidden: Mapping[str, int]
    memory_format: torch.memory_format
    notes: Tuple[str, ...]

    @property
    def cut(self) -> List[str]:
        """Return the blocks that open each part after the first."""
        return [names[0] for names in self.part_names[1:]]


@dataclass
class Placement:
    """Where and how a model is computed.

    device, dtype: of activations.
    engine: kernels and layout.
    parallel: stages and recomputation.
    bound: why another cut would be another result (`recipe.checks.bound_to_cut`), or "".
    """

    device: torch.device
    dtype: torch.dtype
    engine: EngineSection
    parallel: Parallel
    bound: str


def create(
    section: Model,
    seed: int,
    placement: Placement,
    *,
    batch: Batch,
    processes: Processes,
) -> ModelPart:
    """Build the whole model, the same on all processes, and keep what this one computes.

    Args:
        section: the model.
        seed: of its first weights.
        placement: where it is computed.
        batch: of a step.
        processes: of the run; all of them call.

    Raises:
        ConfigError: cut points, blocks to train or blocks to recompute that the model does not
            have, or a stage of which nothing is trained.
    """
    # Built whole everywhere, so that initial weights do not depend on the cut.
    whole = build(section, seed).to(placement.device, placement.dtype)
    trained = trained_names(section, whole)
    freeze(whole, trained)
    memory_format = tuning.apply(whole, placement.engine, placement.device)
    parallel = placement.parallel
    recomputed = blocks_to_recompute(whole.names, parallel.recompute)

    # The cut may be measured, by the whole model as it is to be computed.
    blocks = cuts.Blocks(whole, section, parallel, batch)
    part_names, note = cuts.parts(blocks, processes, placement.device, bound=placement.bound)
    notes = [note] if note else []
    if batch.stages > 1 and processes.topology.stages == 1:
        notes.append(f"one process computes all {batch.stages} stages itself, on one device")

    # A process that has all stages may leave some untrained: it sends no gradient on.
    if processes.topology.stages > 1:
        _check_trained(part_names, trained)

    # What no part of this process contains is garbage once the stages are made.
    own_names = cuts.own_parts(part_names, processes.topology)
    parts = {}
    for number, names in own_names.items():
        parts[number] = Stage(whole.part(names), whole.draws, recomputed, memory_format)
    # All blocks here once more as one list: state has the names of the whole model.
    model = whole.part([name for names in own_names.values() for name in names])
    model.draws = whole.draws
    frozen = _frozen(model)
    buffers = state.persistent_buffers(model)
    return ModelPart(
        model=model,
        parts=parts,
        parameters={name: each for name, each in model.named_parameters() if name in trained},
        buffers={name: buffer for name, buffer in buffers.items() if name not in frozen.names},
        frozen=frozen,
        together=[_trained_names(whole.part(names)) for names in own_names.values()],
        part_names=part_names,
        whole_names=_trained_names(whole),
        shapes=state.shapes(whole),
        norms=norm_parameters(whole),
        hidden=hidden_layers(whole),
        memory_format=memory_format,
        notes=tuple(notes),
    )


def _trained_names(model: BlockList) -> List[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def _frozen(model: BlockList) -> Frozen:
    """Return what of a part is not trained."""
    modules = frozen_modules(model)
    parameters = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            parameters[name] = parameter
    # A running statistic belongs to the normalisation that it lies in.
    buffers = {}
    for name, buffer in state.persistent_buffers(model).items():
        if any(name.startswith(f"{module}.") for module in modules):
            buffers[name] = buffer
    return Frozen(parameters, buffers, modules)


def _check_trained(part_names: Sequence[Sequence[str]], trained: Iterable[str]) -> None:
    """Raise ConfigError for a stage of which nothing is trained: it would have no gradient to send.

    Args:
        part_names: names of the blocks of each part of the model.
        trained: names of parameters.
    """
    for blocks in part_names:
        prefixes = tuple(f"{block}." for block in blocks)
        if not any(name.startswith(prefixes) for name in trained):
            first = f"the stage from {blocks[0]} to {blocks[-1]} has nothing that model.train names"
            raise ConfigError(
                f"{first}; use parallel.stages=1, or cut within what is trained (parallel.split)"
            )

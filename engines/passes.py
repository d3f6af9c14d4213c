"""What computes the micro batches of a step: one process alone, or a pipeline of several."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Dict, List, Mapping, NamedTuple, Optional, Tuple, Union

import torch
from torch import nn

from engines.model_part import ModelPart
from engines.stage import boundaries
from models.base import BlockList
from models.families import build
from models.meta import without_memory
from parallel.processes import Processes
from parallel.work import Boundary, WholeModel
from recipe.distribution import Parallel
from recipe.network import Model
from recipe.settled import image_size

if TYPE_CHECKING:
    from parallel.pipeline import Pipeline


class Rows(NamedTuple):
    """Images of a micro batch, in training and in evaluation."""

    training: int
    evaluation: int


class Passes:
    """Forward and backward passes of this process's part of a model."""

    def __init__(
        self,
        part: ModelPart,
        section: Model,
        parallel: Parallel,
        processes: Processes,
        *,
        training: Mapping[int, nn.Module],
        device: torch.device,
        dtype: torch.dtype,
        rows: Rows,
    ):
        """
        Args:
            part: of the model that is described by `section`.
            section: the model.
            parallel: the schedule of a pipeline.
            processes: of the run.
            training: what computes a stage in training, by number of its part.
            device: that computes.
            dtype: of activations.
            rows: images of a micro batch.
        """
        self._part = part
        self._section = section
        self._parallel = parallel
        self._processes = processes
        self._training = training
        self._device = device
        self._dtype = dtype
        self._rows = rows
        # Pipelines know the shapes of their messages: there is one for each size and number.
        self._pipelines: Dict[Tuple[int, int], Pipeline] = {}
        self._evaluation: Optional[Pipeline] = None

    def training(
        self,
        size: int,
        count: int,
        images: torch.dtype,
    ) -> Union[WholeModel, Pipeline]:
        """Return what computes `count` micro batches of a replica.

        Args:
            size: pixels a side of their images.
            count: how many there are.
            images: dtype of the images, as they enter the model.
        """
        if self._processes.topology.stages == 1:
            return WholeModel(self._training[0], count)
        # The size changes with the epoch, the number with the steps of an update.
        if (size, count) not in self._pipelines:
            from parallel.pipeline import Pipeline  # needs a newer torch than the IPU's

            # Each has memory for the messages of all its micro batches, and images of the sizes
            # before do not come again.
            if any(other != size for other, _ in self._pipelines):
                self._pipelines.clear()
            self._pipelines[size, count] = Pipeline(
                self._training,
                self.boundaries(self._rows.training, size, images),
                schedule=self._parallel.schedule,
                micro_batches=count,
                group=self._processes.stage_group,
                device=self._device,
            )
        return self._pipelines[size, count]

    def predict(self, images: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        """Compute a micro batch in evaluation.

        Args:
            images: uint8 [rows, 3, H, W]; None where they do not enter.

        Returns:
            Logits of all rows, padding included, on the last stage; None elsewhere.
        """
        if self._processes.topology.stages == 1:
            with torch.no_grad():
                return self._part.parts[0](images)
        # One for the whole run, as validation images have one size.
        if self._evaluation is None:
            from parallel.pipeline import Pipeline

            size = image_size(self._section)
            self._evaluation = Pipeline(
                self._part.parts,
                self.boundaries(self._rows.evaluation, size, torch.uint8),
                group=self._processes.stage_group,
                device=self._device,
            )
        return self._evaluation.predict(images)

    def forget(self) -> None:
        """Forget pipelines of training, as replicas get other shares."""
        self._pipelines.clear()

    def boundaries(self, rows: int, size: int, images: torch.dtype) -> List[Boundary]:
        """Return what enters each part of the model, and what leaves the last.

        Args:
            rows: images of a micro batch.
            size: pixels a side.
            images: their dtype, as they enter the model.
        """
        entering = Boundary((rows, 3, size, size), images)
        memory_format = self._part.memory_format
        return boundaries(
            self._part.part_names, self._meta_model, entering, self._dtype, memory_format
        )

    @functools.cached_property
    def _meta_model(self) -> BlockList:
        """Build the whole model without memory, once for all sizes of images."""
        # Of all parts only the shapes are needed, in whichever process they are.
        with without_memory():
            return build(self._section, 0)

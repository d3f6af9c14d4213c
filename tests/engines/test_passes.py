"""Passes: which pipelines of several stages are kept."""

from types import SimpleNamespace
from unittest import mock

import torch

from engines.passes import Passes, Rows


def test_pipelines_of_earlier_sizes_of_images_are_forgotten():
    """Each has memory for its messages. Those of one size stay, for updates of several lengths."""
    processes = SimpleNamespace(topology=SimpleNamespace(stages=2), stage_group=None)
    settings = {
        "training": {},
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "rows": Rows(2, 2),
    }
    passes = Passes(None, None, SimpleNamespace(schedule="gpipe"), processes, **settings)
    with mock.patch.object(Passes, "boundaries"), mock.patch(
        "parallel.pipeline.Pipeline"
    ) as pipeline:
        pipeline.side_effect = lambda *_, **__: object()
        first, shorter = (passes.training(16, count, torch.uint8) for count in (4, 3))
        assert passes.training(16, 4, torch.uint8) is first
        assert passes.training(16, 3, torch.uint8) is shorter
        passes.training(24, 4, torch.uint8)
        assert list(passes._pipelines) == [(24, 4)]

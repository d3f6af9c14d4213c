"""What happens at a first step only, compiling, done before it: no step is a slow surprise."""

from __future__ import annotations

import time
from typing import Dict, Sequence, Tuple

import torch

from engines.stage import Stage
from parallel.work import Boundary
from recipe.errors import first_line


def prepare(stages: Dict[int, Stage], entering: Sequence[Sequence[Boundary]], device: torch.device) -> Tuple[str, ...]:
    """Has stages compiled when they are first computed; for what `entering` says, at once, which a line tells of.

    Where that fails they are computed uncompiled: a missing compiler is no reason not to train.

    Args:
        stages: those of this process, by number.
        entering: for each size of images, what enters each of the model's stages.
    """
    started = time.perf_counter()
    for stage in stages.values():
        stage.compile()
    if not entering:
        return ()
    try:
        for inputs in entering:
            for number, stage in stages.items():
                stage.rehearse(torch.zeros(tuple(inputs[number].shape), dtype=inputs[number].dtype, device=device))
    except Exception as error:  # of a compiler that may be missing, half installed or wrong: there is no list of them
        for stage in stages.values():
            stage.interpret()
        return (f"engine.compile: the model stays uncompiled: {first_line(error)}",)
    return (f"engine.compile: the model compiled in {time.perf_counter() - started:.0f} s",)

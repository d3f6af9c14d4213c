"""The plan of a run on IPUs: every option and the optimizer that PopTorch would be given, and where
each comes from.
"""

from __future__ import annotations

import os
from typing import Iterator, List, Tuple

from recipe.config import Recipe
from recipe.division import Batch
from recipe.ipu import optimizers, options, poprun


def settings(recipe: Recipe, batch: Batch) -> Iterator[Tuple[str, options.Setting]]:
    """Yield each option in this environment, and each call on the model.

    Args:
        recipe: of the run.
        batch: how its global batch is divided.

    Yields:
        "training" or "evaluation", and the setting.
    """
    # All replicas in one process, unless poprun has started several.
    under_poprun = poprun.stages_of_launcher(os.environ) is not None
    for model, make in (
        ("training", options.training_settings),
        ("evaluation", options.evaluation_settings),
    ):
        for setting in make(recipe, batch, batch.replicas, under_poprun):
            yield model, setting
        for call in options.model_calls(recipe, batch, model == "training"):
            yield model, call


def arguments_of_optimizer(recipe: Recipe) -> Iterator[Tuple[str, str, str]]:
    """Yield (argument, value, source) of the constructor of the optimizer of `recipe`.

    The learning rate is the schedule's.
    """
    optimizer = optimizers.optimizer(recipe)
    yield "lr", "the schedule's x the group's", "schedule"
    for name, value in optimizer.options.items():
        yield name, options.shown(value), optimizer.sources[name]


def groups_of_optimizer(recipe: Recipe) -> Iterator[Tuple[str, str, str]]:
    """Yield for each group of parameters of `recipe` (which they are, how they are stepped,
    source).
    """
    for group in optimizers.optimizer(recipe).groups:
        values = ", ".join(f"{name}={value:.6g}" for name, value in group.options.items())
        yield (
            "skipped" if group.skipped else "other",
            f"lr scale {group.lr_scale:.6g}, {values}",
            group.source,
        )


def lines(recipe: Recipe, batch: Batch) -> List[str]:
    """Return the plan as text, an option a line.

    Args:
        recipe: of the run.
        batch: how its global batch is divided.
    """
    # A plan without poprun is of one process that serves all replicas.
    launched = poprun.launched_by(os.environ)
    served = launched.served if launched else batch.replicas
    text = [f"note       {note}" for note in options.notes(recipe, batch.replicas, served)]
    for model, setting in settings(recipe, batch):
        text.append(f"{model:<10} {setting}  <- {setting.source}")
    name = optimizers.optimizer(recipe).name
    for key, value, source in arguments_of_optimizer(recipe):
        text.append(f"optimizer  poptorch.optim.{name}({key}={value})  <- {source}")
    for parameters, stepping, source in groups_of_optimizer(recipe):
        text.append(f"optimizer  {parameters} parameters: {stepping}  <- {source}")
    return text


def as_data(recipe: Recipe, batch: Batch) -> dict:
    """Return the plan as JSON has it, in which names and objects of PopTorch are text.

    Args:
        recipe: of the run.
        batch: how its global batch is divided.
    """
    calls = []
    for model, setting in settings(recipe, batch):
        arguments = [_plain(argument) for argument in setting.arguments]
        calls.append(
            {"model": model, "call": setting.call, "arguments": arguments, "from": setting.source}
        )
    optimizer = optimizers.optimizer(recipe)
    described = {
        "name": f"poptorch.optim.{optimizer.name}",
        "options": {name: _plain(value) for name, value in optimizer.options.items()},
        "constant": list(optimizer.constant),
        "groups": [group._asdict() for group in optimizer.groups],
        "from": {name: source for name, _, source in arguments_of_optimizer(recipe)},
    }
    return {"options": calls, "optimizer": described}


def _plain(value: object) -> object:
    """Return a value as JSON can have it."""
    return str(value) if isinstance(value, (optimizers.Name, options.Chain)) else value

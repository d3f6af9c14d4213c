"""The plan of a run on IPUs: every option and the optimizer that PopTorch would be given, and where each comes from."""

from __future__ import annotations

import os
from typing import Iterator, List, Tuple

from recipe.config import Recipe
from recipe.division import Batch
from recipe.ipu import optimizers, options, poprun


def settings(recipe: Recipe, batch: Batch) -> Iterator[Tuple[str, options.Setting]]:
    """("training" or "evaluation", setting) of each option in this environment, and of each call on the model."""
    under_poprun = poprun.stages_of_launcher(os.environ) is not None
    for model, make in (("training", options.training_settings), ("evaluation", options.evaluation_settings)):
        calls = options.model_calls(recipe, batch, model == "training")
        yield from ((model, each) for each in [*make(recipe, batch, batch.replicas, under_poprun), *calls])


def arguments_of_optimizer(recipe: Recipe) -> Iterator[Tuple[str, str, str]]:
    """(argument, value, source) of the optimizer's constructor; the learning rate is the schedule's."""
    made = optimizers.optimizer(recipe)
    yield "lr", "the schedule's x the group's", "schedule"
    yield from ((name, options.shown(value), made.sources[name]) for name, value in made.options.items())


def groups_of_optimizer(recipe: Recipe) -> Iterator[Tuple[str, str, str]]:
    """(which parameters, how they are stepped, source) of each group."""
    for group in optimizers.optimizer(recipe).groups:
        values = ", ".join(f"{name}={value:.6g}" for name, value in group.options.items())
        yield "skipped" if group.skipped else "other", f"lr scale {group.lr_scale:.6g}, {values}", group.source


def lines(recipe: Recipe, batch: Batch) -> List[str]:
    """The plan as text, an option a line."""
    launched = poprun.launched_by(os.environ)
    served = launched.served if launched else batch.replicas
    shown = [f"note       {note}" for note in options.notes(recipe, batch.replicas, served)]
    shown += [f"{model:<10} {setting}  <- {setting.source}" for model, setting in settings(recipe, batch)]
    name = f"optimizer  poptorch.optim.{optimizers.optimizer(recipe).name}"
    shown += [f"{name}({key}={value})  <- {source}" for key, value, source in arguments_of_optimizer(recipe)]
    groups = groups_of_optimizer(recipe)
    return shown + [f"optimizer  {which} parameters: {how}  <- {source}" for which, how, source in groups]


def as_data(recipe: Recipe, batch: Batch) -> dict:
    """The same as JSON has it. Names and objects of PopTorch are text."""
    made = optimizers.optimizer(recipe)
    calls = [
        {"model": model, "call": each.call, "arguments": list(map(_plain, each.arguments)), "from": each.source}
        for model, each in settings(recipe, batch)
    ]
    optimizer = {
        "name": f"poptorch.optim.{made.name}",
        "options": {name: _plain(value) for name, value in made.options.items()},
        "constant": list(made.constant),
        "groups": [group._asdict() for group in made.groups],
        "from": {name: source for name, _, source in arguments_of_optimizer(recipe)},
    }
    return {"options": calls, "optimizer": optimizer}


def _plain(value: object) -> object:
    return str(value) if isinstance(value, (optimizers.Name, options.Chain)) else value

"""The recipe that a trial trains, from the values that it draws, checked as train.py checks it."""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import Dict, List, Mapping, NamedTuple, Sequence

from common.credentials import masked
from common.errors import ConfigError, UserError
from recipe import batch, loading
from recipe.config import Recipe
from tools.sweeping.definition import Axis, Definition, SweepFile, Value

# Combinations that are checked before the first trial; each takes milliseconds.
_MAX_CHECKED = 200
_COMMAND_LINE = "command line: "  # recipe.loading's place of an override

Parameters = Dict[str, Value]


class Candidates(NamedTuple):
    """The recipes that a sweep may train.

    base: without any parameter.
    fixed: overrides of all trials.
    """

    sweep: SweepFile
    base: Recipe
    fixed: List[str]

    def overrides(self, parameters: Mapping[str, Value]) -> List[str]:
        """Return the overrides that make the recipe of a trial from the sweep's recipe file.

        Args:
            parameters: of the trial.
        """
        drawn = [f"{key}={as_text(value)}" for key, value in parameters.items()]
        return [*self.fixed, *drawn]

    def recipe(self, overrides: Sequence[str]) -> Recipe:
        """Return the recipe of a trial.

        Args:
            overrides: of the sweep's recipe file.

        Raises:
            ConfigError: without a place, if no run of it can begin.
        """
        try:
            # From the file each time, as overrides may choose another kind of a section.
            recipe = loading.load(self.sweep.recipe, overrides)
            # Dividing the batch has checks of its own.
            batch.describe(recipe, here=False)
        except UserError as error:
            raise ConfigError(str(error).removeprefix(_COMMAND_LINE)) from None
        return recipe


def as_text(value: Value) -> str:
    """Return a `value` as overrides and recipes have it.

    JSON is YAML, and quotes texts that YAML takes for something else.
    """
    return json.dumps(value, ensure_ascii=False)


def load_candidates(sweep: SweepFile) -> Candidates:
    """Load the recipes of a sweep's trials.

    Args:
        sweep: a file.

    Raises:
        ConfigError: recipe, metric or batch rule do not fit.
    """
    definition = sweep.definition
    base = _load(sweep, definition.overrides)
    # Trials get credentials by their environment: overrides are written into logs and best.yaml.
    fixed = [masked(override) for override in definition.overrides]
    fixed += _batch_rule(definition, base)
    _check_metric(sweep, base)
    return Candidates(sweep, _load(sweep, fixed), fixed)


def _check_metric(sweep: SweepFile, base: Recipe) -> None:
    """Refuse a metric of an average of weights that no trial keeps. Raises ConfigError."""
    metric = sweep.definition.metric
    if "." not in metric:
        return
    # step_average.top1 needs average.step_decay.
    average = metric.partition("_")[0]
    key = f"average.{average}_decay"
    is_kept = getattr(base.average, f"{average}_decay") is not None
    # A key of the space may have null among its choices: such trials end without the metric.
    if not is_kept and key not in sweep.definition.space:
        raise ConfigError(
            f"{sweep.path}: metric: {metric}, but the recipe keeps no such average; set {key}"
        )


def _load(sweep: SweepFile, overrides: Sequence[str]) -> Recipe:
    """Load a recipe. Raises ConfigError with the place in the sweep's file."""
    try:
        return loading.load(sweep.recipe, overrides)
    except ConfigError as error:
        text = str(error)
        place = "overrides" if text.startswith(_COMMAND_LINE) else "recipe"
        raise ConfigError(f"{sweep.path}: {place}: {text.removeprefix(_COMMAND_LINE)}") from None


def _batch_rule(definition: Definition, base: Recipe) -> List[str]:
    """Return the overrides by which the peak follows the batch as the sweep says.

    It starts at the recipe's batch and peak.
    """
    rule = definition.batch_rule
    if rule is None:
        return []
    # Anchored anew in any case: from a reference batch of its own the recipe's rate would change
    # with the rule.
    reference = "null" if rule == "none" else base.batch.global_
    return [
        f"schedule.batch_rule={rule}",
        f"schedule.reference_batch={reference}",
        f"schedule.peak={batch.peak_learning_rate(base)!r}",
    ]


def survey(candidates: Candidates) -> List[str]:
    """Check choices and ends of ranges before training: all combinations, or 200 at random.

    Args:
        candidates: of a sweep.

    Returns:
        A note if some cannot be trained: trials that draw them end as impossible.

    Raises:
        ConfigError: no combination can have a choice, or none can be trained.
    """
    path = candidates.sweep.path
    space = candidates.sweep.definition.space
    ends = {key: axis.ends() for key, axis in space.items()}
    # A small space is checked as a whole; of a large one a sample shows most faults.
    complete = math.prod(map(len, ends.values())) <= _MAX_CHECKED
    combinations = _combinations(ends) if complete else _draw_combinations(ends)
    faults = [_fault(candidates, parameters) for parameters in combinations]
    if all(faults):
        raise ConfigError(f"{path}: space: no combination can be trained; the first: {faults[0]}")
    # A sample may miss the combinations that a choice goes with.
    if complete:
        unusable = _unusable_choice(space, combinations, faults)
        if unusable:
            raise ConfigError(f"{path}: space: {unusable}")
    impossible = [fault for fault in faults if fault]
    if not impossible:
        return []
    checked = "" if complete else " checked"
    number = f"{len(impossible)} of {len(faults)} combinations{checked}"
    return [f"{number} are impossible, e.g.: {impossible[0]}"]


def _draw_combinations(ends: Mapping[str, Sequence[Value]]) -> List[Parameters]:
    """Draw combinations at random, the same ones each time."""
    draw = random.Random(0)
    drawn = []
    for _ in range(_MAX_CHECKED):
        drawn.append({key: draw.choice(values) for key, values in ends.items()})
    return drawn


def _unusable_choice(
    space: Mapping[str, Axis],
    combinations: Sequence[Parameters],
    faults: Sequence[str],
) -> str:
    """Return the first choice that no combination can have, and a fault with it; or nothing."""
    for key, axis in space.items():
        for choice in axis.choices or ():
            with_choice = []
            for parameters, fault in zip(combinations, faults):
                # By identity: true equals 1, which may be another choice.
                if parameters[key] is choice:
                    with_choice.append(fault)
            if all(with_choice):
                return f"{key}: {as_text(choice)} goes with nothing: {with_choice[0]}"
    return ""


def _fault(candidates: Candidates, parameters: Parameters) -> str:
    """Return why a combination cannot be trained; nothing if it can."""
    try:
        candidates.recipe(candidates.overrides(parameters))
    except ConfigError as error:
        return str(error)
    return ""


def grid(definition: Definition) -> List[Parameters]:
    """Return all combinations in an order drawn by the seed.

    The first few are spread over the whole grid.

    Args:
        definition: of the sweep, whose space is no continuous one.
    """
    axes: Dict[str, Sequence[Value]] = {}
    for key, axis in definition.space.items():
        values = axis.grid()
        # Asked for only where Definition.combinations() counts them.
        assert values is not None
        axes[key] = values
    combinations = _combinations(axes)
    random.Random(definition.seed).shuffle(combinations)
    return combinations


def _combinations(axes: Mapping[str, Sequence[Value]]) -> List[Parameters]:
    """Return all combinations, those of the last key next to each other."""
    return [dict(zip(axes, values)) for values in itertools.product(*axes.values())]

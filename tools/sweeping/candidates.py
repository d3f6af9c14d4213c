"""The recipe that a trial trains, from the values that it draws, checked as train.py would check it."""

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
from tools.sweeping.definition import Definition, SweepFile, Value

_MAX_CHECKED = 200  # combinations that are checked before the first trial; each takes milliseconds
_COMMAND_LINE = "command line: "  # recipe.loading's place of an override

Parameters = Dict[str, Value]


class Candidates(NamedTuple):
    """The recipes that a sweep may train."""

    sweep: SweepFile
    base: Recipe  # without any parameter
    fixed: List[str]  # overrides of all trials

    def overrides(self, parameters: Mapping[str, Value]) -> List[str]:
        """Overrides that make the recipe of a trial from the sweep's recipe file."""
        return [*self.fixed, *(f"{key}={as_text(value)}" for key, value in parameters.items())]

    def recipe(self, overrides: Sequence[str]) -> Recipe:
        """The recipe of a trial. Raises ConfigError, without a place, if no run of it can begin."""
        try:
            recipe = loading.load(self.sweep.recipe, overrides)
            batch.describe(recipe, here=False)
        except UserError as error:
            raise ConfigError(str(error).removeprefix(_COMMAND_LINE)) from None
        return recipe


def as_text(value: Value) -> str:
    """A value as overrides and recipes have it: JSON is YAML, and quotes texts that YAML takes for something else."""
    return json.dumps(value, ensure_ascii=False)


def load_candidates(sweep: SweepFile) -> Candidates:
    """The recipes of a sweep's trials. Raises ConfigError where recipe, metric or batch rule do not fit."""
    definition = sweep.definition
    base = _load(sweep, definition.overrides)
    # Trials get credentials by their environment: their overrides are written into logs and best.yaml.
    fixed = [*map(masked, definition.overrides), *_rule(sweep, base)]
    if "." in definition.metric:
        key = f"{definition.metric.partition('_')[0]}_decay"
        if getattr(base.average, key) is None and f"average.{key}" not in definition.space:
            raise ConfigError(
                f"{sweep.path}: metric: {definition.metric}, but the recipe keeps no such average; set average.{key}"
            )
    return Candidates(sweep, _load(sweep, fixed), fixed)


def _load(sweep: SweepFile, overrides: Sequence[str]) -> Recipe:
    try:
        return loading.load(sweep.recipe, overrides)
    except ConfigError as error:
        text = str(error)
        place = "overrides" if text.startswith(_COMMAND_LINE) else "recipe"
        raise ConfigError(f"{sweep.path}: {place}: {text.removeprefix(_COMMAND_LINE)}") from None


def _rule(sweep: SweepFile, base: Recipe) -> List[str]:
    """The overrides by which the peak follows the batch as the sweep says, starting at the recipe's batch and peak."""
    rule, reference = sweep.definition.batch_rule, base.schedule.reference_batch
    if rule is None:
        return []
    if rule != "none" and reference is not None:
        return [f"schedule.batch_rule={rule}"]
    return [
        f"schedule.batch_rule={rule}",
        f"schedule.reference_batch={'null' if rule == 'none' else base.batch.global_}",
        f"schedule.peak={batch.peak_learning_rate(base)!r}",
    ]


def survey(candidates: Candidates) -> List[str]:
    """Check choices and ends of ranges before training: all combinations, or 200 drawn at random.

    Returns a note if some cannot be trained: trials that draw them end as impossible. Raises ConfigError for a choice
    that no combination can have, or if no combination can be trained.
    """
    sweep, space = candidates.sweep, candidates.sweep.definition.space
    ends = {key: axis.ends() for key, axis in space.items()}
    complete = math.prod(map(len, ends.values())) <= _MAX_CHECKED
    draw = random.Random(0)
    drawn = ({key: draw.choice(each) for key, each in ends.items()} for _ in range(_MAX_CHECKED))
    combinations = _combinations(ends) if complete else list(drawn)
    faults = [_fault(candidates, parameters) for parameters in combinations]
    if all(faults):
        raise ConfigError(f"{sweep.path}: space: no combination can be trained; the first: {faults[0]}")
    for key, axis in space.items() if complete else ():
        for choice in axis.choices or ():
            own = [fault for each, fault in zip(combinations, faults) if each[key] is choice]
            if all(own):
                raise ConfigError(f"{sweep.path}: space: {key}: {as_text(choice)} goes with nothing: {own[0]}")
    impossible = [fault for fault in faults if fault]
    if not impossible:
        return []
    checked = "" if complete else " checked"
    return [f"{len(impossible)} of {len(faults)} combinations{checked} are impossible, e.g.: {impossible[0]}"]


def _fault(candidates: Candidates, parameters: Parameters) -> str:
    try:
        candidates.recipe(candidates.overrides(parameters))
    except ConfigError as error:
        return str(error)
    return ""


def grid(definition: Definition) -> List[Parameters]:
    """All combinations, in an order drawn by the seed, so that the first few are spread over the whole grid."""
    combinations = _combinations({key: axis.grid() for key, axis in definition.space.items()})
    random.Random(definition.seed).shuffle(combinations)
    return combinations


def _combinations(axes: Mapping[str, Sequence[Value]]) -> List[Parameters]:
    return [dict(zip(axes, each)) for each in itertools.product(*axes.values())]

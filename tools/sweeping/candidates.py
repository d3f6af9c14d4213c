"""From the values that a trial draws to the recipe that it trains, checked as train.py would check it.

The batch arithmetic and the rule by which the peak follows the batch are the recipe's own (recipe/batch.py).
"""

from __future__ import annotations

import itertools
import json
import random
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from recipe import batch, loading
from recipe.config import ALTERNATIVES, Recipe
from recipe.credentials import masked
from recipe.errors import ConfigError, UserError
from tools.sweeping.definition import Definition, SweepFile, Value

_LOOKED_AT = 200  # combinations that are checked before the first trial; each takes milliseconds
_OF_OVERRIDES = "command line: "  # the place that recipe.loading names where an override is wrong

Parameters = Dict[str, Value]


class Candidates(NamedTuple):
    """The recipes that a sweep may train."""

    sweep: SweepFile
    base: Recipe  # without any parameter
    fixed: List[str]  # overrides that all trials have

    def overrides(self, parameters: Mapping[str, Value]) -> List[str]:
        """Overrides that make the recipe of a trial from the sweep's recipe file."""
        return [*self.fixed, *(f"{key}={as_text(value)}" for key, value in parameters.items())]

    def fault(self, parameters: Mapping[str, Value], place: Sequence[str] = ()) -> Optional[str]:
        """Why no run with `parameters` can begin, in one line; None: it can. Args: place: more overrides."""
        try:
            batch.describe(loading.load(self.sweep.recipe, [*self.overrides(parameters), *place]))
        except UserError as error:
            return _without_place(error)
        return None


def as_text(value: Value) -> str:
    """A value as an override and a recipe have it. JSON is YAML, and quotes what YAML takes for something else."""
    return json.dumps(value, ensure_ascii=False)


def candidates(sweep: SweepFile) -> Candidates:
    """The recipes of a sweep's trials.

    Raises:
        ConfigError: the recipe cannot be read, or the metric or batch rule does not fit it.
    """
    definition = sweep.definition
    given = list(definition.overrides)
    base = _load(sweep, given)
    # Trials have credentials from their environment: what is theirs is written into logs and best.yaml.
    fixed = [*map(masked, given), *_rule(sweep, base)]
    average = definition.average
    if average is not None:
        key = f"average.{average.partition('_')[0]}_decay"
        if getattr(base.average, key.partition(".")[2]) is None and key not in definition.space:
            raise ConfigError(
                f"{sweep.path}: metric: {definition.metric}, but the recipe keeps no such average; set {key}"
            )
    return Candidates(sweep, _load(sweep, fixed), fixed)


def _load(sweep: SweepFile, overrides: Sequence[str]) -> Recipe:
    try:
        return loading.load(sweep.recipe, overrides)
    except ConfigError as error:
        if str(error).startswith(_OF_OVERRIDES):
            raise ConfigError(f"{sweep.path}: overrides: {_without_place(error)}") from None
        raise ConfigError(f"{sweep.path}: recipe: {error}") from None


def _rule(sweep: SweepFile, base: Recipe) -> List[str]:
    """The overrides that make the peak follow the batch as the sweep says, from where the recipe has it."""
    rule, schedule = sweep.definition.batch_rule, base.schedule
    if rule is None:
        return []
    if rule == "none":
        return [
            "schedule.batch_rule=none",
            "schedule.reference_batch=null",
            f"schedule.peak={batch.peak_learning_rate(base)!r}",
        ]
    if schedule.reference_batch is not None:
        return [f"schedule.batch_rule={rule}"]
    return [
        f"schedule.batch_rule={rule}",
        f"schedule.reference_batch={base.batch.global_}",
        f"schedule.peak={batch.peak_learning_rate(base)!r}",
    ]


def survey(found: Candidates) -> List[str]:
    """Looks, before anything is trained, at the choices and the ends of ranges in all combinations, or in many.

    Returns:
        What cannot be trained, a line each; trials that draw it end as impossible.

    Raises:
        ConfigError: a choice that goes with nothing, or nothing that can be trained at all.
    """
    sweep, space = found.sweep, found.sweep.definition.space
    ends = {key: axis.ends() for key, axis in space.items()}
    combinations, all_of_them = _combinations(ends)
    faults = [found.fault(parameters) for parameters in combinations]
    if all(faults):
        raise ConfigError(f"{sweep.path}: space: no combination can be trained; the first: {faults[0]}")
    notes = []
    for key, values in ends.items():
        for value in values:
            own = [fault for each, fault in zip(combinations, faults) if each[key] is value]
            if not own or not all(own) or not all_of_them:
                continue
            if space[key].choices is not None:
                raise ConfigError(f"{sweep.path}: space: {key}: {as_text(value)} goes with nothing: {own[0]}")
            notes.append(f"{key} at the end of its range, {as_text(value)}: {own[0]}")
    impossible = [fault for fault in faults if fault]
    if impossible and not notes:
        looked = "" if all_of_them else " looked at"
        notes.append(f"{len(impossible)} of {len(faults)} combinations{looked} are impossible, e.g.: {impossible[0]}")
    return notes


def _combinations(values: Mapping[str, Sequence[Value]]) -> Tuple[List[Parameters], bool]:
    """All combinations, or some drawn from them, and whether they are all."""
    count = 1
    for each in values.values():
        count *= len(each)
    if count <= _LOOKED_AT:
        return [dict(zip(values, each)) for each in itertools.product(*values.values())], True
    draw = random.Random(0)
    return [{key: draw.choice(each) for key, each in values.items()} for _ in range(_LOOKED_AT)], False


def _without_place(error: UserError) -> str:
    text = str(error)
    return text[len(_OF_OVERRIDES) :] if text.startswith(_OF_OVERRIDES) else text


def grid(definition: Definition) -> List[Parameters]:
    """All combinations of a grid, in an order drawn by the seed: so the first few already are spread over all of it."""
    axes = {key: axis.grid() for key, axis in definition.space.items()}
    combinations = [dict(zip(axes, each)) for each in itertools.product(*axes.values())]
    random.Random(definition.seed).shuffle(combinations)
    return combinations


def sections(overrides: Sequence[str]) -> Dict[str, Dict[str, str]]:
    """Overrides as the sections of a recipe file: name -> key -> text of the value; of a key's values the last.

    Keys that say the same in other words replace each other, as they do on the command line.
    """
    kept: Dict[str, str] = {}
    for text in overrides:
        name, _, value = text.partition("=")
        for other in _alternatives(name) if value != "null" else ():
            kept.pop(other, None)
        kept[name] = value
    by_section: Dict[str, Dict[str, str]] = {}
    for name, value in kept.items():
        section, _, key = name.partition(".")
        by_section.setdefault(section, {})[key] = value
    return by_section


def _alternatives(name: str) -> List[str]:
    return [other for group in ALTERNATIVES if name in group for other in group if other != name]

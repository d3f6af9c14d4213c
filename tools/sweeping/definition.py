"""Sweep files: the schema, and the reader. candidates.py makes recipes of trials from them."""

from __future__ import annotations

import difflib
from decimal import Decimal
from pathlib import Path
from typing import Any, Dict, List, Literal, NamedTuple, Optional, Sequence, Tuple, Union

from pydantic import Field, ValidationError, model_validator

from recipe.config import ALTERNATIVES, Recipe
from recipe.credentials import ENVIRONMENT, masked
from recipe.errors import ConfigError
from recipe.loading import find, parse_yaml
from recipe.section import Section

_OWN_KEYS = ("run.name", "run.output", "run.resume")  # the sweep gives each trial its own
_AVERAGES = ("step_average", "epoch_average")
_GRID_MOST = 100_000  # combinations; more is no grid that anyone trains
_STEPS_MOST = 10**9

Value = Union[bool, int, float, str, None, List[Any]]


class Axis(Section):
    """The values that a key of the recipe may have: some `choices`, or a range from `low` to `high`, both included."""

    choices: Optional[List[Any]] = Field(None, min_length=1, description="numbers, texts, true, false, null or lists")
    low: Optional[float] = Field(None, description="least value")
    high: Optional[float] = Field(None, description="largest value")
    log: bool = Field(False, description="draw from the range evenly on a logarithmic scale")
    step: Optional[float] = Field(None, gt=0, description="only low, low + step, low + 2 step ...")
    integer: bool = Field(False, description="whole numbers only")

    @model_validator(mode="after")
    def _one_kind(self) -> Axis:
        if self.choices is not None:
            if self.model_fields_set != {"choices"}:
                raise ValueError("choices and a range are both given; keep one")
            shown = [repr(choice) for choice in self.choices]
            twice = next((text for text in shown if shown.count(text) > 1), None)
            if twice is not None:
                raise ValueError(f"choices has {twice} twice")
            if any(isinstance(choice, dict) for choice in self.choices):
                raise ValueError("a choice is the value of one key, not keys below it")
            return self
        if self.low is None or self.high is None:
            raise ValueError("give choices, or low and high")
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}")
        if self.log and self.low <= 0:
            raise ValueError(f"a logarithmic range must begin above 0, not at {self.low:g}")
        if self.log and self.step is not None:
            raise ValueError("log and step are both given; keep one")
        if self.integer and any(each is not None and each % 1 for each in (self.low, self.high, self.step)):
            raise ValueError("low, high and step of whole numbers must be whole numbers")
        self._whole_steps()
        return self

    def _whole_steps(self) -> None:
        if self.step is None:
            return
        low, high, step = (Decimal(repr(each)) for each in (self.low, self.high, self.step))
        if (high - low) / step > _STEPS_MOST:
            raise ValueError(f"more than {_STEPS_MOST:,} steps; leave out step")
        rest = (high - low) % step
        if rest:
            raise ValueError(
                f"from low {low} no whole number of steps of {step} leads to high {high}; e.g. {high - rest}"
            )

    def grid(self) -> Optional[List[Value]]:
        """All values, in order; None where there is no end of them."""
        if self.choices is not None:
            return list(self.choices)
        if self.step is None and not self.integer:
            return [self.low] if self.low == self.high else None
        low, high, step = Decimal(repr(self.low)), Decimal(repr(self.high)), Decimal(repr(self.step or 1.0))
        numbers = [low + step * number for number in range(min(int((high - low) / step), _GRID_MOST) + 1)]
        return [int(each) if self.integer else float(each) for each in numbers]

    def on_step(self, value: float) -> float:
        """The nearest value of the range, without the noise of adding up steps: 0.3, not 0.30000000000000004."""
        low, step = Decimal(repr(self.low)), Decimal(repr(self.step))
        return float(low + step * round((Decimal(repr(value)) - low) / step))

    def ends(self) -> List[Value]:
        """All choices, or the two ends of the range: what is looked at before anything is trained."""
        if self.choices is not None:
            return list(self.choices)
        ends = (self.low,) if self.low == self.high else (self.low, self.high)
        return [int(end) if self.integer else end for end in ends]


class Definition(Section):
    """A sweep: which recipe, which of its keys take which values, how many trials, and what makes one the best."""

    recipe: str = Field(description="the recipe that trials vary; relative to the sweep file")
    overrides: List[str] = Field([], description="section.key=value, laid over the recipe in all trials")
    trials: Optional[int] = Field(None, gt=0, description="how many; null: all of a grid")
    sampler: Literal["tpe", "random", "grid"] = Field("tpe", description="what draws the values of a trial")
    seed: int = Field(0, ge=0, lt=2**63, description="of the sampler; the recipe has its own")
    metric: str = Field("best_top1", description="best_top1, top1, top5 or loss; of an average: epoch_average.top1 ...")
    pruner: Literal["none", "median"] = Field(
        "none", description="median ends a trial that is worse than half of the trials were after as many evaluations"
    )
    pruner_startup_trials: int = Field(5, ge=1, description="trials that must be complete before one is pruned")
    pruner_warmup: int = Field(1, ge=0, description="evaluations of a trial before it may be pruned")
    batch_rule: Optional[Literal["linear", "sqrt", "none"]] = Field(
        None, description="how the peak learning rate follows the global batch; null: as the recipe says"
    )
    space: Dict[str, Axis] = Field(min_length=1, description="section.key of the recipe -> the values it may have")

    @property
    def direction(self) -> str:
        """Whether the metric is to `maximize` or to `minimize`."""
        return "minimize" if self.metric.rpartition(".")[2] == "loss" else "maximize"

    @property
    def average(self) -> Optional[str]:
        """The average of the weights that the metric is of, if any."""
        return self.metric.partition(".")[0] if "." in self.metric else None

    @model_validator(mode="after")
    def _known_metric(self) -> Definition:
        metrics = ["best_top1"] + [
            f"{prefix}{name}"
            for prefix in ("", *(f"{each}." for each in _AVERAGES))
            for name in ("top1", "top5", "loss")
        ]
        if self.metric not in metrics:
            raise ValueError(f"metric: {self.metric!r} is none of {', '.join(metrics)}{_nearest(self.metric, metrics)}")
        return self

    @model_validator(mode="after")
    def _known_keys(self) -> Definition:
        known = [
            f"{section}.{key}" for section, field in Recipe.model_fields.items() for key in field.annotation.fields()
        ]
        unknown = next((key for key in self.space if key not in known), None)
        if unknown is not None:
            instead = _nearest(unknown, known) or "; write section.key as in a recipe, e.g. optimizer.momentum"
            raise ValueError(f"space: {unknown}: unknown key{instead}")
        return self

    @model_validator(mode="after")
    def _fitting_keys(self) -> Definition:
        fixed = {text.partition("=")[0] for text in self.overrides}
        for key in (*self.space, *fixed):
            if key in _OWN_KEYS:
                raise ValueError(f"{key} is given to each trial by the sweep; remove it")
        for key in self.space:
            if key in fixed:
                raise ValueError(f"{key} is in the space and in the overrides; keep one")
            if any(masked(str(choice)) != str(choice) for choice in self.space[key].choices or ()):
                raise ValueError(f"space: {key}: choices are stored; give credentials in {ENVIRONMENT} or ~/.netrc")
        for group in ALTERNATIVES:
            given = [key for key in group if key in self.space]
            if len(given) > 1:
                raise ValueError(f"space: {' and '.join(given)} say the same; keep one")
        return self

    @model_validator(mode="after")
    def _enough_values(self) -> Definition:
        endless = next((key for key, axis in self.space.items() if axis.grid() is None), None)
        size = self.combinations()
        if self.sampler == "grid":
            if endless is not None:
                raise ValueError(
                    f"space: {endless}: the range has no end of values; give a step or choices, or use tpe"
                )
            if size is None:
                raise ValueError(f"space: more than {_GRID_MOST:,} combinations; use sampler random or tpe")
        elif self.trials is None:
            raise ValueError(f"trials: how many is needed for the sampler {self.sampler}")
        if size is not None and self.trials is not None and self.trials > size:
            raise ValueError(f"trials: {self.trials}, but the space has {size} combinations; give at most {size}")
        return self

    def combinations(self) -> Optional[int]:
        """How many different trials there can be; None: more than anyone trains."""
        size = 1
        for axis in self.space.values():
            values = axis.grid()
            size *= _GRID_MOST + 1 if values is None else len(values)
            if size > _GRID_MOST:
                return None
        return size


class SweepFile(NamedTuple):
    """A definition, and where it stands."""

    path: Path
    definition: Definition

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def word(self) -> str:
        """The name as a run may have it."""
        letters = (letter if letter.isalnum() or letter in "_.-" else "_" for letter in self.name)
        return "".join(letters).lstrip(".-") or "sweep"

    @property
    def recipe(self) -> Path:
        return self.path.parent / self.definition.recipe


def read(path: Path, overrides: Sequence[str] = (), trials: Optional[int] = None) -> SweepFile:
    """The sweep in `path`, with what the command line adds.

    Raises:
        ConfigError: unreadable file, bad YAML, unknown key, wrong type or range.
    """
    path = find(path)
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a sweep file, e.g. configs/sweeps/digits.yaml") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file; a sweep file is YAML in UTF-8") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a sweep file: expected keys such as `recipe:` and `space:`")
    if "space" not in content and "recipe" not in content and {"run", "model", "extends"} & set(content):
        raise ConfigError(
            f"{path}: a recipe, not a sweep file; train it by train.py, or name it in `recipe:` of a sweep"
        )
    if trials is not None:
        content["trials"] = trials
    if overrides and isinstance(content.get("overrides") or [], list):
        content["overrides"] = [*(content.get("overrides") or []), *overrides]
    try:
        return SweepFile(path, Definition.model_validate(content))
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first_line(error)}") from None


def _first_line(error: ValidationError) -> str:
    """The first fault as one line, and how many more there are."""
    faults = error.errors(include_url=False)
    fault = faults[0]
    place = fault["loc"]
    if fault["type"] == "extra_forbidden":
        known = list((Axis if len(place) > 1 else Definition).model_fields)
        instead = _nearest(str(place[-1]), known) or f"; there are {', '.join(known)}"
        line = f"{_joined(place)}: unknown key{instead}"
    elif fault["type"] == "missing":
        line = f"{_joined(place)}: is needed"
    else:
        message = str(fault["ctx"]["error"]) if fault["type"] == "value_error" else _message(fault)
        line = ": ".join(part for part in (_joined(place), message) if part)
    return line + (f" (and {len(faults) - 1} more)" if len(faults) > 1 else "")


def _message(fault: dict) -> str:
    subject, _, rest = fault["msg"].replace(" after validation, not 0", "").partition(" should ")
    return f"must {rest}, found {fault['input']!r}" if rest else f"{subject}, found {fault['input']!r}"


def _joined(place: Tuple[Union[int, str], ...]) -> str:
    return ": ".join(str(part) for part in place)


def _nearest(name: str, names: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""

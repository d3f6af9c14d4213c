"""Schema and reader of sweep files; candidates.py makes the recipes of trials from them."""

from __future__ import annotations

import difflib
import re
from decimal import Decimal
from pathlib import Path
from typing import (
    Any,
    Dict,
    Iterator,
    List,
    Literal,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

from pydantic import Field, ValidationError

from common.credentials import ENVIRONMENT, masked
from common.errors import ConfigError
from common.yaml_text import read_yaml
from recipe.config import ALTERNATIVES, Recipe
from recipe.loading import find
from recipe.section import PathText, Section, first_fault

# The sweep gives each trial its own, and no mirror.
_OWN_KEYS = ("run.name", "run.output", "run.resume", "checkpoint.mirror")
# Combinations. A grid is listed and shuffled in memory, and no sweep trains as many trials.
_MAX_GRID = 100_000

Value = Union[bool, int, float, str, None, List[Any]]


class Axis(Section):
    """The values that a key of the recipe may have.

    They are some `choices`, or a range from `low` to `high`, both included.
    """

    choices: Optional[List[Any]] = Field(
        None,
        min_length=1,
        description="numbers, texts, true, false, null or lists",
    )
    low: Optional[float] = Field(None, description="least value")
    high: Optional[float] = Field(None, description="largest value")
    log: bool = Field(
        False,
        description="draw from the range evenly on a logarithmic scale",
    )
    step: Optional[float] = Field(
        None,
        gt=0,
        description="only low, low + step, low + 2 step ...",
    )
    integer: bool = Field(False, description="whole numbers only")

    def faults(self) -> Iterator[str]:
        """Yield what is wrong; the first fault counts, and later checks may need it mended."""
        if self.choices is not None:
            yield from self._choice_faults(self.choices)
        elif self.low is None or self.high is None:
            yield "give choices, or low and high"
        else:
            yield from self._range_faults(self.low, self.high)

    def _choice_faults(self, choices: List[Any]) -> Iterator[str]:
        """Yield the faults of choices."""
        if self.model_fields_set != {"choices"}:
            yield "choices and a range are both given; keep one"
        if any(isinstance(choice, dict) for choice in choices):
            yield "a choice is the value of one key, not keys below it"
        # By their text: true equals 1 but is another choice, and lists have no hash.
        if len(set(map(repr, choices))) < len(choices):
            yield "choices has a value twice"

    def _range_faults(self, low: float, high: float) -> Iterator[str]:
        """Yield the faults of a range."""
        if low > high:
            yield f"low {low:g} is above high {high:g}"
        if self.log and low <= 0:
            yield f"a logarithmic range must begin above 0, not at {low:g}"
        if self.log and self.step is not None:
            yield "log and step are both given; keep one"
        # A whole number may be written as a float, such as 16.0.
        if self.integer and (low % 1 or high % 1 or (self.step or 0) % 1):
            yield "low, high and step of whole numbers must be whole numbers"
        if self.step is not None:
            yield from _step_faults(_decimal(low), _decimal(high), _decimal(self.step))

    @property
    def bounds(self) -> Tuple[float, float]:
        """Return least and largest value of a range; an axis with choices has none."""
        # `faults` refuses axes with neither choices nor both ends.
        assert self.low is not None and self.high is not None
        return self.low, self.high

    def grid(self) -> Optional[List[Value]]:
        """Return all values in order; None for a continuous range."""
        if self.choices is not None:
            return list(self.choices)
        low, high = self.bounds
        if self.step is None and not self.integer:
            return [low] if low == high else None
        first = _decimal(low)
        step = _decimal(self.step or 1.0)
        count = int((_decimal(high) - first) / step) + 1
        kind = int if self.integer else float
        # One more than a grid may have is enough to refuse it.
        return [kind(first + step * number) for number in range(min(count, _MAX_GRID + 1))]

    def ends(self) -> List[Value]:
        """Return all choices, or the ends of the range: they are checked before training."""
        if self.choices is not None:
            return self.choices
        # A set: a range may consist of one number.
        ends = sorted(set(self.bounds))
        if self.integer:
            return [int(end) for end in ends]
        return list(ends)


def _step_faults(low: Decimal, high: Decimal, step: Decimal) -> Iterator[str]:
    """Yield the fault if no whole number of steps leads from `low` to `high`."""
    # Of floats a rest would be left where there is none, as in 0.3 % 0.1.
    rest = (high - low) % step
    if rest:
        yield f"from low {low} no whole number of steps of {step} leads to high {high}; e.g. {high - rest}"


def _decimal(value: float) -> Decimal:
    """Return the number that a user wrote: steps of 0.1 are exact in decimals only."""
    return Decimal(repr(value))


class Definition(Section):
    """A sweep: the recipe, which of its keys take which values, how many trials, and the metric."""

    recipe: PathText = Field(
        description="the recipe that trials vary; relative to the sweep file",
    )
    overrides: List[str] = Field(
        [],
        description="section.key=value, laid over the recipe in all trials",
    )
    trials: Optional[int] = Field(None, gt=0, description="how many; null: all of a grid")
    sampler: Literal["tpe", "random", "grid"] = Field(
        "tpe",
        description="what draws the values of a trial",
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="of the sampler; the recipe has its own",
    )
    metric: Literal[
        "best_top1",
        "top1",
        "top5",
        "loss",
        "step_average.top1",
        "step_average.top5",
        "step_average.loss",
        "epoch_average.top1",
        "epoch_average.top5",
        "epoch_average.loss",
    ] = Field("best_top1", description="value of the evaluations that ranks the trials")
    pruner: Literal["none", "median"] = Field(
        "none",
        description="median ends a trial that is worse than half are",
    )
    pruner_startup_trials: int = Field(
        5,
        ge=1,
        description="trials that must be complete before one is pruned",
    )
    pruner_warmup: int = Field(
        1,
        ge=0,
        description="evaluations of a trial before it may be pruned",
    )
    batch_rule: Optional[Literal["linear", "sqrt", "none"]] = Field(
        None,
        description="how the peak follows the batch",
    )
    space: Dict[str, Axis] = Field(
        min_length=1,
        description="section.key of the recipe -> the values it may have",
    )

    @property
    def direction(self) -> Literal["minimize", "maximize"]:
        """Return whether the metric is to `maximize` or to `minimize`."""
        # An average's loss comes after a dot: epoch_average.loss.
        return "minimize" if self.metric.rpartition(".")[2] == "loss" else "maximize"

    @property
    def sign(self) -> int:
        """Return a factor by which the best trial has the least value of the metric."""
        return 1 if self.direction == "minimize" else -1

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with the keys, and with the number of trials."""
        yield from self._key_faults()
        yield from self._size_faults()

    def _key_faults(self) -> Iterator[str]:
        """Yield keys that may not be there, or that contradict each other."""
        fixed = {override.partition("=")[0] for override in self.overrides}
        for key in (*self.space, *fixed):
            if key in _OWN_KEYS:
                yield f"{key} is given to each trial by the sweep; remove it"
        known = _keys_of_recipes()
        for key, axis in self.space.items():
            if key not in known:
                instead = _nearest(key, known)
                if not instead:
                    instead = "; write section.key as in a recipe, e.g. optimizer.momentum"
                yield f"space: {key}: unknown key{instead}"
            if key in fixed:
                yield f"{key} is in the space and in the overrides; keep one"
            # Study and leaderboard are plain files.
            if any(masked(str(choice)) != str(choice) for choice in axis.choices or ()):
                yield f"space: {key}: choices are stored; give credentials in {ENVIRONMENT} or ~/.netrc"
        for group in ALTERNATIVES:
            given = [key for key in group if key in self.space]
            if len(given) > 1:
                yield f"space: {' and '.join(given)} say the same; keep one"

    def _size_faults(self) -> Iterator[str]:
        """Yield numbers of trials that do not go with the space or the sampler."""
        size = self.combinations()
        if self.sampler == "grid" and size is None:
            most = f"at most {_MAX_GRID:,} combinations"
            yield f"space: a grid needs choices, steps or whole numbers, {most}; or use tpe"
        # Other samplers could go on for ever.
        if self.sampler != "grid" and self.trials is None:
            yield f"trials: is needed for the sampler {self.sampler}"
        if size is not None and self.trials is not None and self.trials > size:
            yield f"trials: {self.trials}, but the space has {size} combinations; give at most {size}"

    def combinations(self) -> Optional[int]:
        """Return the number of different trials; None: a continuous space, or above 100,000."""
        size = 1
        for axis in self.space.values():
            values = axis.grid()
            if values is None:
                return None
            size *= len(values)
        return size if size <= _MAX_GRID else None


def _keys_of_recipes() -> List[str]:
    """Return section.key of all keys that a recipe may have."""
    keys = []
    for section, field in Recipe.model_fields.items():
        kind = field.annotation
        # A recipe consists of sections, which are annotated.
        assert kind is not None
        keys += [f"{section}.{key}" for key in kind.fields()]
    return keys


class SweepFile(NamedTuple):
    """A definition and its file.

    path: of the file.
    definition: its content.
    """

    path: Path
    definition: Definition

    @property
    def name(self) -> str:
        """Return the name of the sweep: that of its file."""
        return self.path.stem

    @property
    def word(self) -> str:
        """Return the name with nothing that the name of a run may not have."""
        return re.sub(r"[^\w.-]", "_", self.name).lstrip(".-") or "sweep"

    @property
    def recipe(self) -> Path:
        """Return the path of the recipe."""
        return self.path.parent / self.definition.recipe


def read(path: Path, overrides: Sequence[str] = (), trials: Optional[int] = None) -> SweepFile:
    """Read a sweep.

    Args:
        path: of its file.
        overrides: of the command line, laid over those of the file.
        trials: of the command line, instead of those of the file.

    Raises:
        ConfigError: there is no such file, or it is wrong.
    """
    path = find(path)
    content = read_yaml(path, str(path), "name a sweep file, e.g. configs/sweeps/digits.yaml")
    # A likely mistake, which deserves a better answer than an unknown key.
    if not isinstance(content, dict) or _is_recipe(content):
        raise ConfigError(
            f"{path}: not a sweep file, which has `recipe:` and `space:`; train a recipe by train.py, or name it there"
        )
    if trials is not None:
        content["trials"] = trials
    # Those of the command line come last, where they win.
    given = content.get("overrides") or []
    if overrides and isinstance(given, list):
        content["overrides"] = [*given, *overrides]
    try:
        return SweepFile(path, Definition.model_validate(content))
    except ValidationError as error:
        place, words = first_fault(error, _suggest)
        raise ConfigError(": ".join(map(str, (path, *place, words)))) from None


def _is_recipe(content: dict) -> bool:
    """Return whether the content of a file is that of a recipe."""
    return "recipe" not in content and not content.keys().isdisjoint({"run", "model", "extends"})


def _suggest(*place: str) -> str:
    """Return a remedy for an unknown key at a place of the file."""
    schema = Axis if len(place) > 1 else Definition
    known = list(schema.model_fields)
    return _nearest(str(place[-1]), known) or f"; the keys are {', '.join(known)}"


def _nearest(name: str, names: Sequence[str]) -> str:
    """Return a question for the name that is most like another; nothing if none is."""
    matches = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""

"""Base class of all sections of a recipe: strict types, no unknown keys, immutable."""

import json
import re
from typing import Any, Callable, Dict, Iterator, List, Tuple

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo
from typing_extensions import Annotated

from common.files import expanded

# A path, in which a leading ~ is the home folder.
PathText = Annotated[str, AfterValidator(expanded)]


class Section(BaseModel):
    """Base of the sections of a recipe.

    Annotations are evaluated at run time and must work on Python 3.8. A key is described by
    `description`, where that fits into its line, or else by a docstring below it.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with keys that each are valid, but do not go together."""
        return iter(())

    @model_validator(mode="after")
    def _faultless(self) -> "Section":
        """Raise ValueError for the first fault."""
        # One at a time: an error is one line with one remedy.
        for fault in self.faults():
            raise ValueError(fault)
        return self

    @classmethod
    def fields(cls) -> Dict[str, FieldInfo]:
        """Return the keys in a file, with their fields."""
        return {field.alias or name: field for name, field in cls.model_fields.items()}

    def defaults(self) -> Dict[str, Any]:
        """Return the default of each key, as in a file, for a recipe with the same names."""
        # Not checked: the defaults of some sections do not make a valid recipe by themselves.
        return type(self).model_construct().model_dump(mode="json", by_alias=True)

    def changes(self) -> Dict[str, Any]:
        """Return the keys, as in a file, whose values are not their defaults."""
        defaults = self.defaults()
        values = self.model_dump(mode="json", by_alias=True)
        return {key: value for key, value in values.items() if value != defaults[key]}


def first_fault(error: ValidationError, suggest: Callable[..., str]) -> Tuple[tuple, str]:
    """Return the place of the first fault, and its words with how many more there are.

    Args:
        error: with one fault or more.
        suggest: called with the place of an unknown key; returns the remedy.
    """
    # Only the first, in one line: later faults may follow from it.
    fault, *more = error.errors(include_url=False)
    if fault["type"] == "extra_forbidden":
        words = f"unknown key{suggest(*fault['loc'])}"
    elif fault["type"] == "missing":
        words = "is needed"
    elif fault["type"] == "value_error":
        words = str(fault["ctx"]["error"])
    else:
        # pydantic's "Input should be a valid integer" becomes "must be a valid integer".
        words = f"{re.sub('^[A-Z][a-z]+ should', 'must', fault['msg'])}, found {fault['input']!r}"
    return fault["loc"], words + (f" (and {len(more)} more)" if more else "")


def exactly_one(section: Section, names: Tuple[str, ...], required: bool) -> Iterator[str]:
    """Yield the fault if more than one of the keys `names` is given, or none where one is
    `required`.
    """
    given = [name for name in names if getattr(section, name) is not None]
    if len(given) > 1 or (required and not given):
        yield f"one of {', '.join(names)} is needed, found {' and '.join(given) or 'none'}"


def shares(values: List[float]) -> List[float]:
    """Return `values`. Raises ValueError unless each is above 0 and at most 1."""
    if not all(0 < value <= 1 for value in values):
        raise ValueError(f"{values} must be numbers above 0 and at most 1")
    return values


def check_pairs(pairs: List[list], first: str, second: str) -> None:
    """Raise ValueError unless these are pairs whose first numbers begin at 0 and rise.

    Args:
        pairs: as a recipe gives them.
        first: unit of the first numbers.
        second: unit of the second numbers.
    """
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"must be [{first}, {second}] pairs, found {pairs}")
    # Readers take the last pair that has begun, so that one must begin at 0, and their order counts.
    starts = [pair[0] for pair in pairs]
    if starts[0] != 0 or starts != sorted(set(starts)):
        raise ValueError(
            f"the first pair must begin at 0 {first}, and each later pair after the one before it"
        )


def or_auto(schema: dict) -> None:
    """Add auto to the JSON `schema` of a number, in place."""
    options = schema.get("anyOf") or [{key: schema.pop(key) for key in ("type", "minimum")}]
    schema["anyOf"] = [{"const": "auto"}, *(dict(option) for option in options)]


def as_yaml(value: Any) -> str:
    """Return `value` in one line, as a recipe could have it."""
    if isinstance(value, list):
        return f"[{', '.join(map(as_yaml, value))}]"
    if isinstance(value, float):
        return f"{value:.10g}"  # 0.1 + 0.2 is written 0.3
    return value if isinstance(value, str) else json.dumps(value)

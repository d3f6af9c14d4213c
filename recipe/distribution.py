"""The section `parallel`: how a model is cut and copied."""

from typing import Any, Dict, Iterator, List, Literal, Optional, Union

from pydantic import (
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from recipe.section import Section, or_auto

_VIRTUAL_STAGES = 2  # of a device under the interleaved schedule, by default
# JSON Schema of a list of blocks: pydantic's own would describe None, not the word auto.
_BLOCKS: Dict[str, JsonValue] = {"type": "array", "items": {"type": "string"}}
_WORDS = {"split": "auto, counted", "recompute": "true, false"}


class Parallel(Section):
    """How the model is cut and copied. A single process runs all stages itself."""

    stages: int = Field(1, ge=1, json_schema_extra=or_auto)
    """pipeline stages of one replica, each on a device of its own; auto takes the IPUs that poprun
    gives a replica, elsewhere 1, and cuts anew where split is a list for another number"""
    split: Union[Literal["counted"], List[str], None] = Field(
        None,
        json_schema_extra={
            "anyOf": [{"const": "auto"}, {"const": "counted"}, _BLOCKS, {"type": "null"}]
        },
    )
    """block that opens each stage after the first, e.g. [blocks.3.0]; auto (or null) balances
    stages by measured costs of blocks, or by multiply-adds where the cut changes what is learned;
    counted: always by multiply-adds"""
    schedule: Literal["gpipe", "1f1b", "interleaved", "sharded"] = "gpipe"
    """order of a stage's micro batches: gpipe, all forward, then all backward; 1f1b, in turn, which
    holds fewer activations; interleaved, in turn over several parts of the model on each device;
    IPUs: gpipe and 1f1b are the one order that PopART has, sharded lets one stage work at a time,
    and I/O overlap it"""
    virtual_stages: Optional[int] = Field(None, ge=2)
    """interleaved: parts of the model on each device (2)"""
    recompute: Union[bool, List[str]] = Field(
        False, json_schema_extra={"anyOf": [{"type": "boolean"}, _BLOCKS]}
    )
    """compute activations again in the backward pass instead of keeping them: true, false, or a
    list of blocks"""
    replicas: Optional[int] = Field(None, ge=1, json_schema_extra=or_auto)
    """copies of the model; auto (or null) takes what the launcher started"""
    shares: Literal["even", "measured"] = "even"
    """micro batches of each replica in a step: even, as many as of the others; measured, as many as
    it is fast, which changes no bit in tree order"""
    elastic: bool = False
    """a replica that is lost is left out, and taken in again once it is back: within the run, with
    the same bits"""
    minimum: int = Field(1, ge=1, description="elastic: replicas with fewer of which the run ends")
    silence: float = Field(300.0, ge=1, le=86_400)
    """seconds of silence after which a rank counts as lost and the run ends; a rank that dies is
    noticed at once"""

    @field_validator("replicas", mode="before")
    @classmethod
    def _auto(cls, value: object) -> object:
        """Read the word auto as None, which code asks for."""
        return None if value == "auto" else value

    @field_validator("split", "recompute", mode="wrap")
    @classmethod
    def _word_or_blocks(cls, value: object, handler: Any, info: ValidationInfo) -> object:
        """Validate a key that is one of some words, or a list of blocks; an error is one line."""
        try:
            return handler(None if value == "auto" else value)
        except ValidationError:
            # One line in the place of pydantic's, which has one for each type of the union.
            assert info.field_name is not None, "validators of fields know their field"
            example = value if isinstance(value, str) else "head"
            fault = f"must be {_WORDS[info.field_name]} or a list of blocks, found {value!r}"
            raise ValueError(f"{fault}; write a list as [{example}]") from None

    @field_serializer("replicas", "split")
    def _say_auto(self, value: Any) -> Any:
        """Write None as the word auto, which users know."""
        return "auto" if value is None else value

    @model_validator(mode="before")
    @classmethod
    def _by_schedule(cls, values: Any) -> Any:
        """Fill in the virtual stages of the interleaved schedule."""
        # The default depends on another key; settled here, config.yaml shows the number.
        if isinstance(values, dict) and values.get("schedule") == "interleaved":
            return {**values, "virtual_stages": values.get("virtual_stages") or _VIRTUAL_STAGES}
        return values

    def faults(self) -> Iterator[str]:
        """Yield faults of schedules without enough stages, and of a wrong number of cut points."""
        if self.schedule in ("interleaved", "sharded") and self.stages == 1:
            yield f"schedule {self.schedule} needs stages of 2 or more"
        if self.schedule != "interleaved" and self.virtual_stages is not None:
            yield "virtual_stages goes with schedule interleaved; give virtual_stages=null"
        # The first part begins with the model.
        cut_points = self.parts - 1
        if isinstance(self.split, list) and len(self.split) != cut_points:
            virtual = f" x {self.virtual_stages} virtual" if self.virtual_stages else ""
            needed = f"{self.stages} stages{virtual} need {cut_points}"
            named = f"split names {len(self.split)} cut points"
            yield f"{named} but {needed}; name them, or give split=auto"

    @property
    def parts(self) -> int:
        """Consecutive parts that the model is cut into: stages, times the virtual stages of each."""
        return self.stages * (self.virtual_stages or 1)

    @property
    def least(self) -> int:
        """Micro batches of a step that each replica needs, on CPUs and GPUs."""
        # 1F1B begins to send gradients back once every stage has a micro batch.
        return self.stages if self.schedule in ("1f1b", "interleaved") else 1

    def in_flight(self, accumulation: int) -> List[int]:
        """Return the micro batches whose activations each part holds at once, on CPUs and GPUs.

        All of a step with GPipe (1811.06965), else one for each part from here to the last
        (1806.03377).

        Args:
            accumulation: micro batches of a step.
        """
        if self.schedule == "gpipe":
            return [accumulation] * self.parts
        return [min(accumulation, self.parts - part) for part in range(self.parts)]

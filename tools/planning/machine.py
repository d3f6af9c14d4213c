"""A machine as plans know it: a few figures, each with its source.

They were published, or measured by `tools.doctor`.
"""

from __future__ import annotations

from pathlib import Path
from typing import List, Literal, Optional

import yaml
from pydantic import Field, ValidationError

from common.errors import ConfigError
from common.yaml_text import read_yaml
from recipe.section import Section

FOLDER = Path(__file__).parent / "machines"


class Figure(Section):
    """A number and where it comes from: a publication or a measurement."""

    value: float = Field(ge=0)
    source: str = Field(min_length=1)


class Rate(Figure):
    """A figure to divide by; a millionth a second of anything is as good as nothing."""

    value: float = Field(ge=1e-6)


class Reach(Section):
    """Links among the devices that are near each other: those of one host, of one rack, of all."""

    devices: Optional[int] = Field(
        None,
        ge=1,
        description="how many devices these links join; null: any number",
    )
    latency: Figure = Field(description="seconds of a message however short")
    bandwidth: Rate = Field(
        description="bytes a second that a device sends, while it receives as many",
    )


class Machine(Section):
    """Devices of one kind and what feeds them. Rates are those of one device."""

    name: str
    device: Literal["cpu", "cuda", "ipu"]
    devices_per_host: int = Field(1, ge=1)
    memory: Figure = Field(description="bytes")
    rate: Rate = Field(
        description="multiply-adds a second in training: forward, twice backward, recomputed",
    )
    calibrated_on: str = Field(
        description="what the rate was found with: model, image size, micro batch, precision",
    )
    update: Rate = Field(description="parameters a second that the optimizer steps")
    straggling: Figure = Field(
        description="standard deviation of the seconds a replica's step takes, over their mean",
    )
    links: List[Reach] = Field(
        min_length=1,
        description="from the nearest devices to the farthest",
    )
    overlap: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the last backward pass beside which exchanges run",
    )
    cores: float = Field(gt=0, description="processor cores for each device")
    decode: Rate = Field(description="images a second that one core reads, decodes and augments")
    disk: Optional[Figure] = Field(
        None,
        description="bytes a second that one process reads from where the images are",
    )
    to_device: Rate = Field(description="bytes a second from the host to one device")


def names() -> List[str]:
    """Return the names of the machines that come along."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str) -> Machine:
    """Load the machine called `name`, or described by the file of that name.

    Raises:
        ConfigError: there is none, or the file describes no machine.
    """
    known = FOLDER / f"{name}.yaml"
    path = known if known.exists() else Path(name)
    remedy = f"name a file written by python -m tools.doctor, or one of {', '.join(names())}"
    content = read_yaml(path, f"{name}: unknown machine", remedy)
    try:
        return Machine.model_validate(content)
    except ValidationError as error:
        # One fault is enough for a line.
        fault = error.errors(include_url=False)[0]
        key = ".".join(map(str, fault["loc"])) or "its content"
        raise ConfigError(f"{path}: not a machine: {key}: {fault['msg']}") from None


def dump(machine: Machine) -> str:
    """Return the `machine` as YAML that `load` reads back to an equal one."""
    content = machine.model_dump(mode="json", exclude_none=True)
    return yaml.safe_dump(content, sort_keys=False, width=110)

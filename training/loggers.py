"""The registry of loggers, which receive the numbers of a run besides metrics.jsonl.

A logger is a schema class that adds its key to the section `log` (recipe/config.py), and a class that registers for it,
in services.py or a file of its own (example: tests/additions/logger.py). What belongs to a service, such as the
project, is set by its own environment variables (WANDB_PROJECT ...).
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Type

from common.errors import ConfigError, first_line
from common.files import write_text
from common.json_io import json_text, read_json
from recipe import batch as arithmetic
from recipe.config import Log, Recipe
from recipe.kinds import Registry
from training import metrics
from training.run_folder import first_difference

FILE = "loggers.json"  # in the run folder: state of each service by its key


class ServiceState(NamedTuple):
    """A service's name for the run, the last step it has by kind of event, and the recipe it first received.
    recipe: None in files of older versions."""

    run: str
    steps: Dict[str, int]
    recipe: Optional[Dict[str, dict]] = None


class Session(NamedTuple):
    """Arguments of a logger. step: updates done so far. earlier: None in a run's first session."""

    name: str
    recipe: Dict[str, dict]
    folder: Path
    step: int
    earlier: Optional[ServiceState]
    say: Callable[[str], None]


class Logger:
    """Receives the events of one session of a run, on its main rank.

    key: of the section `log`. package: pip's name of a service's package, whose module is named by the key; a service
    never ends a run: once it fails, it is left out. settings: defaults of its environment variables. run: its name for
    the run.
    """

    key: str
    package: Optional[str] = None
    settings: Dict[str, str] = {}
    run: Optional[str] = None

    def __init__(self, session: Session): ...

    def event(self, kind: str, step: int, values: dict) -> None:
        """Receive one event of metrics.jsonl; `values` are its fields but `event` and `step`."""

    def close(self, exit_code: int) -> None:
        """End the session; `exit_code` is that of train.py."""


LOGGERS: Registry[Type[Logger]] = Registry("a logger")


def numbers(kind: str, values: dict) -> Dict[str, float]:
    """Return the numbers of an event by name: `kind/name`, and those of a dictionary `name/key`."""
    found = {}
    for name, value in values.items():
        if isinstance(value, (int, float)):
            found[f"{kind}/{name}"] = value
        elif isinstance(value, dict):
            found.update({f"{name}/{key}": number for key, number in value.items()})
    return found


class Service(Logger):
    """A logger that is left out once it fails."""

    def __init__(self, logger: Type[Logger], session: Session):
        self.key, self._say = logger.key, session.say
        self._logger: Optional[Logger] = None
        for name, value in logger.settings.items():
            os.environ.setdefault(name, value)
        self._try(lambda: setattr(self, "_logger", logger(session)))
        self.run = self._logger.run if self._logger else None

    def event(self, kind: str, step: int, values: dict) -> None:
        self._try(lambda: self._logger and self._logger.event(kind, step, values))

    def close(self, exit_code: int) -> None:
        self._try(lambda: self._logger and self._logger.close(exit_code))

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # libraries that talk to servers raise anything
            self._logger = None
            self._say(f"log.{self.key}: {first_line(error)}; the run goes on without it")


def _wanted(log: Log) -> List[Type[Logger]]:
    return [logger for logger in LOGGERS.all_of(log) if getattr(log, logger.key)]


def check(log: Log) -> None:
    """Raises ConfigError for a service whose package is not installed."""
    for key, package in ((logger.key, logger.package) for logger in _wanted(log) if logger.package):
        found = importlib.util.find_spec(key)
        if found is None or found.origin is None:  # without an origin it is a folder of this name
            fault = f"the package {key} is not installed"
            raise ConfigError(f"log.{key}: {fault}; pip install {package}, or log.{key}=false")


def service_states(recipe: Recipe, folder: Path) -> Dict[str, ServiceState]:
    """Return the state of each service by key; none for those that have another recipe, or where it cannot be read.
    A recipe may be changed before anything is trained."""
    states = {}
    try:
        entries = read_json(folder / FILE).items()
        steps = {kind: event["step"] for kind, event in metrics.last_events(folder / metrics.NAME).items()}
        for name, entry in entries:
            state = ServiceState(**entry)
            have = {kind: max(state.steps.get(kind, 0), steps.get(kind, 0)) for kind in {**state.steps, **steps}}
            begun = Recipe.model_validate_json(json.dumps(state.recipe)) if state.recipe else recipe
            if not first_difference(begun, recipe):
                states[name] = state._replace(steps=have)
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return states


def start(recipe: Recipe, step: int, say: Callable[[str], None]) -> List[Logger]:
    """Start the loggers that the recipe selects, before metrics.jsonl is cut back to the checkpoint of `step`.

    The events behind the checkpoint, which services have, will come a second time. Args: say: prints a line.

    Raises OSError where the run folder cannot be written.
    """
    folder, sections = Path(arithmetic.output_folder(recipe)), recipe.model_dump(mode="json", by_alias=True)
    known = service_states(recipe, folder)
    found: List[Logger] = []
    for kind in _wanted(recipe.log):
        earlier = known.get(kind.key)
        session = Session(recipe.run.name, sections, folder, step, earlier, say)
        found.append(Service(kind, session) if kind.package else kind(session))
        if found[-1].run:
            known[kind.key] = (earlier or ServiceState("", {}, sections))._replace(run=found[-1].run)
    if known:
        write_text(folder / FILE, json_text({name: each._asdict() for name, each in known.items()}, indent=1) + "\n")
    return found

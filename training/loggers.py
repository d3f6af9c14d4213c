"""The registry of loggers, which receive the numbers of a run besides metrics.jsonl.

A logger is a schema class that adds its key to the section `log` (recipe/config.py), and a class
that registers for it, in services.py or a file of its own (example: tests/additions/logger.py).
Settings of a service, such as the project, are its own environment variables (WANDB_PROJECT ...).
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Type

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
    """State of a service in a run.

    run: the service's name for it.
    steps: the last step that the service has, by kind of event.
    recipe: sections of the recipe of its last session; None in files of older versions.
    """

    run: str
    steps: Dict[str, int]
    recipe: Optional[Dict[str, dict]] = None


class Session(NamedTuple):
    """Arguments of a logger.

    name: of the run.
    recipe: its sections.
    folder: of the run.
    step: steps done so far.
    earlier: None in a run's first session, and for loggers of no service.
    say: prints a line.
    """

    name: str
    recipe: Dict[str, dict]
    folder: Path
    step: int
    earlier: Optional[ServiceState]
    say: Callable[[str], None]


class Logger:
    """Receives the events of one session of a run, on its main rank.

    key: of the section `log`.
    package: pip's name of a service's package, whose module is named by the key. A service never
        ends a run: once it fails, it is left out.
    needs: pip's name of a package without which a logger that is no service cannot begin, likewise.
    settings: defaults of the service's environment variables.
    run: the service's name for the run.
    """

    key: str
    package: Optional[str] = None
    needs: Optional[str] = None
    settings: Dict[str, str] = {}
    run: Optional[str] = None

    def __init__(self, session: Session): ...

    def event(self, kind: str, step: int, values: dict) -> None:
        """Receive one event of metrics.jsonl.

        Args:
            kind: train, eval, checkpoint or end.
            step: steps done.
            values: its fields but `event` and `step`.
        """

    def close(self, exit_code: int) -> None:
        """End the session; `exit_code` is that of train.py."""


LOGGERS: Registry[Type[Logger]] = Registry("a logger")


def numbers(kind: str, values: dict) -> Dict[str, float]:
    """Return the numbers of an event by name: `kind/name`, and those of a dictionary `name/key`.

    Args:
        kind: of the event.
        values: its fields.
    """
    by_name = {}
    for name, value in values.items():
        if isinstance(value, (int, float)):
            by_name[f"{kind}/{name}"] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                by_name[f"{name}/{key}"] = inner
    return by_name


class Service(Logger):
    """A logger that is left out once it fails."""

    def __init__(self, logger: Type[Logger], session: Session):
        """
        Args:
            logger: class of the service's logger.
            session: its argument.
        """
        self.key = logger.key
        self._say = session.say
        self._logger: Optional[Logger] = None
        # Before the logger imports its package; what the user has set counts.
        for name, value in logger.settings.items():
            os.environ.setdefault(name, value)
        self._logger = self._try(lambda: logger(session))
        self.run = self._logger.run if self._logger else None

    def event(self, kind: str, step: int, values: dict) -> None:
        """Pass on an event of this `kind`, unless the service is left out."""
        # A service that failed may not be asked again: each time-out would hold up the training.
        logger = self._logger
        if logger is not None:
            self._try(lambda: logger.event(kind, step, values))

    def close(self, exit_code: int) -> None:
        """End the session with `exit_code`, unless the service is left out."""
        logger = self._logger
        if logger is not None:
            self._try(lambda: logger.close(exit_code))

    def _try(self, call: Callable[[], Any]) -> Any:
        """Return what `call` returns; where it fails say so, and leave the service out."""
        try:
            return call()
        except Exception as error:  # libraries that talk to servers raise anything
            self._logger = None
            self._say(f"log.{self.key}: {first_line(error)}; the run goes on without it")
            return None


def check(log: Log) -> None:
    """Raise ConfigError for a logger whose package is not installed.

    Args:
        log: section of the recipe, which selects loggers.
    """
    for logger in _selected(log):
        package = logger.package or logger.needs
        if package is None:
            continue
        spec = importlib.util.find_spec(logger.key)
        if spec is None or spec.origin is None:  # without an origin it is a folder of this name
            fault = f"the package {logger.key} is not installed"
            remedy = f"pip install {package}, or log.{logger.key}=false"
            raise ConfigError(f"log.{logger.key}: {fault}; {remedy}")


def service_states(recipe: Recipe, folder: Path) -> Dict[str, ServiceState]:
    """Return the state of each service by key.

    Services that have another recipe are left out, as their numbers would be those of two runs: a
    recipe may be changed before anything is trained.

    Args:
        recipe: of the run.
        folder: of the run; where its file cannot be read, no service has a state.
    """
    # A damaged file costs the curves in a service, never the run.
    states = {}
    try:
        last_events = metrics.last_events(folder / metrics.NAME)
        logged = {kind: event["step"] for kind, event in last_events.items()}
        for key, entry in read_json(folder / FILE).items():
            # The file has the steps of a session's start, metrics.jsonl those since.
            state = ServiceState(**entry)
            steps = _latest(state.steps, logged)
            begun = recipe
            if state.recipe:
                begun = Recipe.model_validate_json(json.dumps(state.recipe))
            if not first_difference(begun, recipe):
                states[key] = state._replace(steps=steps)
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return states


def start(recipe: Recipe, step: int, say: Callable[[str], None]) -> List[Logger]:
    """Start the loggers that the recipe selects.

    This comes before metrics.jsonl is cut back to the checkpoint of `step`: the events behind it,
    which services have, will come a second time.

    Args:
        recipe: of the run.
        step: steps done.
        say: prints a line.

    Raises:
        OSError: the run folder cannot be written.
    """
    # Services get the recipe as a file has it: numbers and texts.
    folder = Path(arithmetic.output_folder(recipe))
    sections = recipe.model_dump(mode="json", by_alias=True)
    states = service_states(recipe, folder)
    loggers: List[Logger] = []
    for kind in _selected(recipe.log):
        session = Session(
            name=recipe.run.name,
            recipe=sections,
            folder=folder,
            step=step,
            earlier=states.get(kind.key),
            say=say,
        )
        # A service may fail. What is written into the run folder must not, or the run ends.
        logger = Service(kind, session) if kind.package else kind(session)
        loggers.append(logger)
        if logger.run:
            state = session.earlier or ServiceState("", {}, sections)
            states[kind.key] = state._replace(run=logger.run)
    # Services that were selected in earlier sessions alone keep their states. All get the recipe of
    # this one: the next session is compared with the images that this one has accepted.
    if states:
        content = {}
        for key, state in states.items():
            content[key] = state._replace(recipe=sections)._asdict()
        write_text(folder / FILE, json_text(content, indent=1) + "\n")
    return loggers


def _selected(log: Log) -> List[Type[Logger]]:
    """Return the classes of the loggers that a recipe switches on."""
    return [logger for logger in LOGGERS.all_of(log) if getattr(log, logger.key)]


def _latest(sent: Dict[str, int], logged: Dict[str, int]) -> Dict[str, int]:
    """Return the larger step of each kind of event; every logged event was sent, too."""
    kinds = {**sent, **logged}
    return {kind: max(sent.get(kind, 0), logged.get(kind, 0)) for kind in kinds}

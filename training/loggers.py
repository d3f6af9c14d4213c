"""Where the numbers of a run go besides metrics.jsonl: TensorBoard's files, Weights & Biases, MLflow.

Each takes the same events. What belongs to the services rather than to the run, such as the project, is told by their
own environment variables (WANDB_PROJECT, MLFLOW_TRACKING_URI ...). A service that fails is left out from then on: it
never ends a run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional

from recipe import batch as arithmetic
from recipe.bounded import parse_json, read_json
from recipe.config import Log, Recipe
from recipe.errors import DONE, STOPPED, ConfigError, first_line
from recipe.files import write_text, writing
from training.run_folder import first_difference

FILE = "loggers.json"  # in the run folder: what the services call the run, and how far they were told of it

# What the services take for their settings where the user has chosen none: no wait of more than about a minute, and
# the terminal left to the progress bar.
_SETTINGS = {
    "WANDB_CONSOLE": "off",
    "WANDB_FINISH_TIMEOUT": "60",
    "WANDB_INIT_TIMEOUT": "60",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}  # key of the section `log` -> what pip installs


class Logger(ABC):
    """Takes the events of one session of a run, on its main rank."""

    @abstractmethod
    def event(self, kind: str, step: int, values: dict) -> None:
        """One event of metrics.jsonl, `event` and `step` apart."""

    @abstractmethod
    def close(self, exit_code: int) -> None:
        """The session's end; `exit_code` is that of train.py (recipe/errors.py)."""


class Told(NamedTuple):
    """What a service knows from earlier sessions.

    run: its name for the run. steps: the last one by kind of event. recipe: its sections as the service was first told
    them; None in files of older versions.
    """

    run: str
    steps: Dict[str, int]
    recipe: Optional[Dict[str, dict]] = None


class Session(NamedTuple):
    """What a service is told as it starts.

    name: of the run. recipe: its sections. folder: of the run. earlier: None in a run's first session. say: prints a
    line.
    """

    name: str
    recipe: Dict[str, dict]
    folder: Path
    earlier: Optional[Told]
    say: Callable[[str], None]


def numbers(kind: str, values: dict) -> Dict[str, float]:
    """The numbers of an event by name: `kind/name`, and those of a dictionary `name/key`."""
    found = {}
    for name, value in values.items():
        if isinstance(value, (int, float)):
            found[f"{kind}/{name}"] = value
        elif isinstance(value, dict):
            found.update({f"{name}/{key}": number for key, number in value.items()})
    return found


class TensorBoardLogger(Logger):
    """Files for TensorBoard. That they cannot be written ends a run, as with the run's other files."""

    def __init__(self, folder: Path, step: int):
        """Args: step: updates done so far; later events of an earlier session are dropped."""
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        self._writer = SummaryWriter(str(folder), purge_step=step + 1)
        self._excepthook = threading.excepthook
        threading.excepthook = self._report

    def event(self, kind: str, step: int, values: dict) -> None:
        with writing(self._folder):
            for name, number in numbers(kind, values).items():
                self._writer.add_scalar(name, number, step)

    def close(self, exit_code: int) -> None:
        try:
            with writing(self._folder):
                self._writer.close()
        finally:
            threading.excepthook = self._excepthook

    def _report(self, failure: threading.ExceptHookArgs) -> None:
        """Leaves out that the disk is full: the writer's thread hands this on to the next event, or to `close`."""
        if not issubclass(failure.exc_type, OSError):
            self._excepthook(failure)


class WandbLogger(Logger):
    """A run of Weights & Biases, its files below the run folder; written offline where the service cannot be reached.

    Steps between the checkpoint and the end of a session that was killed come twice. W&B drops those that it has, and
    it need not have them: what it was told last may have been lost with the process.
    """

    def __init__(self, session: Session):
        import wandb

        about = {
            "name": session.name,
            "dir": str(session.folder),
            "config": session.recipe,
            "id": session.earlier.run if session.earlier else None,
            "resume": "allow" if session.earlier else None,
        }
        try:
            self._run = wandb.init(**about)
        except wandb.Error as error:
            session.say(
                f"log.wandb: {first_line(error)}; written offline, to be sent by "
                f"`wandb sync {session.folder}/wandb/offline-run-*`"
            )
            self._run = wandb.init(**about, mode="offline")
        self.run: str = self._run.id

    def event(self, kind: str, step: int, values: dict) -> None:
        found = numbers(kind, values)
        if found:
            self._run.log(found, step=step)

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


class MlflowLogger(Logger):
    """A run of MLflow. Its parameters are the recipe's keys, with the values that a command line would give them.

    MLflow keeps all it is told, at once. So it is told nothing twice.
    """

    def __init__(self, session: Session):
        import mlflow

        run, self._told, _ = session.earlier or Told("", {})
        self._mlflow = mlflow
        self.run: str = mlflow.start_run(run_id=run or None, run_name=session.name).info.run_id
        if not run:  # a parameter cannot be changed, but where a run is computed may
            keys = {f"{name}.{key}": value for name, keys in session.recipe.items() for key, value in keys.items()}
            mlflow.log_params({key: v if isinstance(v, str) else json.dumps(v) for key, v in keys.items()})

    def event(self, kind: str, step: int, values: dict) -> None:
        found = numbers(kind, values)
        if found and step > self._told.get(kind, 0):
            self._mlflow.log_metrics(found, step=step)

    def close(self, exit_code: int) -> None:
        self._mlflow.end_run(status={DONE: "FINISHED", STOPPED: "KILLED"}.get(exit_code, "FAILED"))


_SERVICES: Dict[str, Callable[[Session], Logger]] = {"wandb": WandbLogger, "mlflow": MlflowLogger}


class Service(Logger):
    """A logger that may fail, and then is left out."""

    def __init__(self, name: str, session: Session):
        self._name, self._say = name, session.say
        self._logger: Optional[Logger] = None
        self._try(lambda: self._start(session))

    @property
    def run(self) -> Optional[str]:
        """The service's name for the run; None where it could not be reached."""
        return self._logger.run if self._logger else None

    def event(self, kind: str, step: int, values: dict) -> None:
        if self._logger:
            self._try(lambda: self._logger.event(kind, step, values))

    def close(self, exit_code: int) -> None:
        if self._logger:
            self._try(lambda: self._logger.close(exit_code))

    def _start(self, session: Session) -> None:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        self._logger = _SERVICES[self._name](session)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # of whatever kind: these are libraries that talk to servers
            self._logger = None
            self._say(f"log.{self._name}: {first_line(error)}; the run goes on without it")


def check(log: Log) -> None:
    """Raises ConfigError for a service whose package is not installed."""
    for name, package in _PACKAGES.items():
        if not getattr(log, name):
            continue
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # without a place: a folder that happens to have this name
            raise ConfigError(
                f"log.{name}: the package {name} is not installed; pip install {package}, or log.{name}=false"
            )


def told_before(log: Log, folder: Path) -> Dict[str, Told]:
    """What each service that is wanted knows of the run; call it before metrics.jsonl is cut back to the checkpoint.

    Between the checkpoint and the end of metrics.jsonl are events that will come a second time.
    """
    wanted = [name for name in _SERVICES if getattr(log, name)]
    if not wanted:
        return {}
    steps = last_steps(folder / "metrics.jsonl")
    try:
        saved = read_json(folder / FILE)
        told = {name: Told(**entry) for name, entry in saved.items()}
        return {
            name: each._replace(steps=_later(each.steps, steps)) if name in wanted else each
            for name, each in told.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def start(recipe: Recipe, step: int, told: Dict[str, Told], say: Callable[[str], None]) -> List[Logger]:
    """The loggers that the recipe asks for.

    Args:
        step: updates done so far.
        told: what `told_before` found.
        say: prints a line: that a service cannot be reached.

    Raises:
        OSError: the run folder cannot be written.
    """
    folder, sections = Path(arithmetic.output_folder(recipe)), recipe.model_dump(mode="json", by_alias=True)
    found: List[Logger] = []
    if recipe.log.tensorboard:
        found.append(TensorBoardLogger(folder / "tensorboard", step))
    known = {name: each for name, each in told.items() if _same_run(each, recipe)}
    for name in (name for name in _SERVICES if getattr(recipe.log, name)):
        earlier = known.get(name)
        service = Service(name, Session(recipe.run.name, sections, folder, earlier, say))
        found.append(service)
        if service.run:
            known[name] = earlier._replace(run=service.run) if earlier else Told(service.run, {}, sections)
    if known:
        write_text(folder / FILE, json.dumps({name: each._asdict() for name, each in known.items()}, indent=1) + "\n")
    return found


def _same_run(told: Told, recipe: Recipe) -> bool:
    """Whether a service was told of this recipe: before anything is trained, another may take its place."""
    if told.recipe is None:
        return True
    try:
        return not first_difference(Recipe.model_validate_json(json.dumps(told.recipe)), recipe)
    except ValueError:
        return False


def last_steps(metrics: Path) -> Dict[str, int]:
    """The last step of each kind of event in a metrics file; lines that are no events, as if cut off, are left out."""
    steps: Dict[str, int] = {}
    try:
        with open(metrics, "rb") as lines:
            for line in lines:
                steps.update(_step_of(line))
    except OSError:
        return {}
    return steps


def _step_of(line: bytes) -> Dict[str, int]:
    """The kind of event in a line and its step, or nothing."""
    try:
        event = parse_json(line)
        kind, step = event["event"], event["step"]
    except (ValueError, TypeError, KeyError):
        return {}
    return {kind: step} if isinstance(kind, str) and isinstance(step, int) else {}


def _later(one: Dict[str, int], other: Dict[str, int]) -> Dict[str, int]:
    """The later step of each kind."""
    return {kind: max(one.get(kind, 0), other.get(kind, 0)) for kind in {**one, **other}}

"""The loggers: TensorBoard's files, and Weights & Biases and MLflow, optional packages that send to
a server.
"""

from __future__ import annotations

import threading
from typing import Dict

from common.errors import DONE, STOPPED, first_line
from common.files import writing
from common.json_io import json_text
from recipe.config import MLflow, TensorBoard, WeightsAndBiases
from training.loggers import LOGGERS, Logger, ServiceState, Session, numbers


@LOGGERS.implements(TensorBoard)
class TensorBoardLogger(Logger):
    """Files for TensorBoard. If they cannot be written the run ends, as with the run's other files."""

    key = "tensorboard"
    needs = "tensorboard"

    def __init__(self, session: Session):
        from torch.utils.tensorboard import SummaryWriter

        self._folder = session.folder / "tensorboard"
        # Points behind the checkpoint come a second time: those of the earlier session are dropped.
        self._writer = SummaryWriter(str(self._folder), purge_step=session.step + 1)
        # The writer's thread would print a traceback for what the next event raises as one line.
        self._excepthook = threading.excepthook
        threading.excepthook = self._report

    def event(self, kind: str, step: int, values: dict) -> None:
        """Write the numbers of an event of this `kind`: see `Logger.event`."""
        with writing(self._folder):
            for name, value in numbers(kind, values).items():
                self._writer.add_scalar(name, value, step)

    def close(self, exit_code: int) -> None:
        """Write what is left, whatever the `exit_code`."""
        try:
            with writing(self._folder):
                self._writer.close()
        finally:
            threading.excepthook = self._excepthook

    def _report(self, failure: threading.ExceptHookArgs) -> None:
        """Keep silent about a full disk: the writer's thread reports it to the next event, or to
        `close`.
        """
        if not issubclass(failure.exc_type, OSError):
            self._excepthook(failure)


@LOGGERS.implements(WeightsAndBiases)
class WandbLogger(Logger):
    """A run of Weights & Biases, its files below the run folder.

    It is written offline where the service cannot be reached. After a resume steps are sent twice:
    W&B drops those that it has, and may have lost the last ones.
    """

    key = "wandb"
    package = "wandb"
    settings = {
        "WANDB_CONSOLE": "off",
        "WANDB_FINISH_TIMEOUT": "60",
        "WANDB_INIT_TIMEOUT": "60",
    }

    def __init__(self, session: Session):
        import wandb

        about = {
            "name": session.name,
            "dir": str(session.folder),
            "config": session.recipe,
            "id": None,
            "resume": None,
        }
        # "allow", not "must": the run may have been deleted there, and begins anew then.
        if session.earlier:
            about.update(id=session.earlier.run, resume="allow")
        try:
            self._run = wandb.init(**about)
        except wandb.Error as error:
            session.say(
                f"log.wandb: {first_line(error)}; written offline, to be sent by "
                f"`wandb sync {session.folder}/wandb/offline-run-*`"
            )
            self._run = wandb.init(**about, mode="offline")
        self.run = self._run.id

    def event(self, kind: str, step: int, values: dict) -> None:
        """Send the numbers of an event of this `kind`: see `Logger.event`."""
        metrics = numbers(kind, values)
        if metrics:
            self._run.log(metrics, step=step)

    def close(self, exit_code: int) -> None:
        """End the run of the service with the `exit_code`, of which it shows whether it failed."""
        self._run.finish(exit_code=exit_code)


@LOGGERS.implements(MLflow)
class MlflowLogger(Logger):
    """A run of MLflow, its parameters the recipe's keys.

    MLflow stores every event, so none is sent twice.
    """

    key = "mlflow"
    package = "mlflow-skinny"
    settings = {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    }

    def __init__(self, session: Session):
        import mlflow

        # Steps that it has are kept from being sent again: they would be points of their own.
        earlier = session.earlier or ServiceState("", {})
        self._sent = earlier.steps
        self._mlflow = mlflow
        started = mlflow.start_run(run_id=earlier.run or None, run_name=session.name)
        self.run = started.info.run_id
        # A parameter cannot be changed, but where a run is computed may.
        if not earlier.run:
            mlflow.log_params(_parameters(session.recipe))

    def event(self, kind: str, step: int, values: dict) -> None:
        """Send the numbers of an event of this `kind`, unless an earlier session has."""
        metrics = numbers(kind, values)
        if metrics and step > self._sent.get(kind, 0):
            self._mlflow.log_metrics(metrics, step=step)

    def close(self, exit_code: int) -> None:
        """End the run of the service, with the status that the `exit_code` stands for."""
        statuses = {DONE: "FINISHED", STOPPED: "KILLED"}
        self._mlflow.end_run(status=statuses.get(exit_code, "FAILED"))


def _parameters(recipe: Dict[str, dict]) -> Dict[str, str]:
    """Return the keys of all sections of a recipe, as `section.key`, with their values as text."""
    parameters = {}
    for section, keys in recipe.items():
        for key, value in keys.items():
            text = value if isinstance(value, str) else json_text(value)
            parameters[f"{section}.{key}"] = text
    return parameters

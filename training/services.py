"""Weights & Biases, and MLflow: optional packages that send the numbers of a run to a server."""

from __future__ import annotations

import json

from recipe.config import MLflow, WeightsAndBiases
from recipe.errors import DONE, STOPPED, first_line
from training.loggers import LOGGERS, Logger, ServiceState, Session, numbers


@LOGGERS.implements(WeightsAndBiases)
class WandbLogger(Logger):
    """A run of Weights & Biases, its files below the run folder; written offline where the service cannot be reached.

    Steps between the checkpoint and the end of a session that was killed come twice. W&B drops those that it has, and
    it need not have them: what it received last may have been lost with the process.
    """

    key = package = "wandb"
    # At most a minute of waiting, and the terminal left to the progress bar.
    settings = {"WANDB_CONSOLE": "off", "WANDB_FINISH_TIMEOUT": "60", "WANDB_INIT_TIMEOUT": "60"}

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
        self.run = self._run.id

    def event(self, kind: str, step: int, values: dict) -> None:
        found = numbers(kind, values)
        if found:
            self._run.log(found, step=step)

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


@LOGGERS.implements(MLflow)
class MlflowLogger(Logger):
    """A run of MLflow. Its parameters are the recipe's keys, with the values that a command line would give them.

    MLflow stores every event at once and forever, so none is sent twice.
    """

    key, package = "mlflow", "mlflow-skinny"
    # At most half a minute of waiting.
    settings = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}

    def __init__(self, session: Session):
        import mlflow

        run, self._sent, _ = session.earlier or ServiceState("", {})
        self._mlflow = mlflow
        self.run = mlflow.start_run(run_id=run or None, run_name=session.name).info.run_id
        if not run:  # a parameter cannot be changed, but where a run is computed may
            keys = {f"{name}.{key}": value for name, keys in session.recipe.items() for key, value in keys.items()}
            mlflow.log_params({key: v if isinstance(v, str) else json.dumps(v) for key, v in keys.items()})

    def event(self, kind: str, step: int, values: dict) -> None:
        found = numbers(kind, values)
        if found and step > self._sent.get(kind, 0):
            self._mlflow.log_metrics(found, step=step)

    def close(self, exit_code: int) -> None:
        self._mlflow.end_run(status={DONE: "FINISHED", STOPPED: "KILLED"}.get(exit_code, "FAILED"))

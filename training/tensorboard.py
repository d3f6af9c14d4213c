"""Files for TensorBoard, in the run folder."""

from __future__ import annotations

import threading

from recipe.config import TensorBoard
from recipe.files import writing
from training.loggers import LOGGERS, Logger, Session, numbers


@LOGGERS.implements(TensorBoard)
class TensorBoardLogger(Logger):
    """Files for TensorBoard. That they cannot be written ends a run, as with the run's other files."""

    key = "tensorboard"

    def __init__(self, session: Session):
        from torch.utils.tensorboard import SummaryWriter

        self._folder = session.folder / "tensorboard"
        self._writer = SummaryWriter(str(self._folder), purge_step=session.step + 1)  # drops an earlier session's
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

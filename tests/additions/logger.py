"""A logger of one's own: the losses, a line each."""

from pydantic import Field

from recipe.config import Log
from training.loggers import LOGGERS, Logger, Session


class Losses(Log):
    """A text file of losses."""

    losses: bool = Field(False, description="also write the losses to losses.txt")


@LOGGERS.implements(Losses)
class LossesLogger(Logger):
    key = "losses"

    def __init__(self, session: Session):
        self._path = session.folder / "losses.txt"

    def event(self, kind: str, step: int, values: dict) -> None:
        if kind == "train":
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(f"{step} {values['loss']}\n")

    def close(self, exit_code: int) -> None: ...

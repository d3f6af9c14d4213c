"""What a session goes on from, besides the checkpoints of its run folder."""

from __future__ import annotations

import time
from typing import Dict, List, Optional

from common.errors import MachineError
from data.base import Source
from engines.base import Engine
from parallel.processes import Processes
from recipe.batch import output_folder
from recipe.config import Recipe
from training.images import open_sources
from training.progression import Progression
from training.run_folder import InUse, RunFolder

_RETRY_SECONDS = 0.05


class Continuation:
    """An ordinary session, which remembers nothing; an elastic run has another (training.elastic).

    later: whether the same processes have begun this run before, and said what there is to say.
    signal: number of the signal that asked to stop before the loop could listen.
    patience: seconds in which another process may give the run folder back.
    has_trained: whether this process remembers a step of this run.
    """

    later: bool = False
    signal: Optional[int] = None
    patience: float = 0.0
    has_trained: bool = False

    def open_sources(self, recipe: Recipe, processes: Processes) -> List[Source]:
        """Open training and validation images of a `recipe` where they enter, elsewhere none.

        All `processes` call.
        """
        return processes.together(lambda: open_sources(recipe, processes.topology))

    def open_folder(self, recipe: Recipe, processes: Processes) -> RunFolder:
        """Open the run folder, which another process may have to give back first.

        Args:
            recipe: of the run.
            processes: this one of which has the folder.

        Raises:
            MachineError: the other process does not give it back.
            Regroup: the generation is over meanwhile.
            UserError: see `RunFolder`.
        """
        # A main process that was left out of an elastic run holds the lock until it has noticed.
        end = time.monotonic() + self.patience
        while True:
            try:
                return RunFolder(recipe, self.has_trained)
            except InUse:
                if not self.patience:
                    raise
                # The input was right as the run began: it is the machine that fails.
                if time.monotonic() > end:
                    fault = f"is still in use by another process after {self.patience:g} s"
                    remedy = "end that one, then rerun to resume"
                    raise MachineError(f"{output_folder(recipe)} {fault}; {remedy}") from None
            # The others go on as soon as one of them is lost, and must not wait for this one.
            # A signal does not end the wait: without the folder nothing can be saved.
            processes.check()
            time.sleep(_RETRY_SECONDS)

    def close_folder(self, folder: RunFolder) -> None:
        """Close the run `folder` of a session that has ended, by whatever."""
        folder.close()

    def with_micro_batch(self, recipe: Recipe, processes: Processes) -> Recipe:
        """Return the `recipe` with the micro batch that the run has had. All `processes` call."""
        return recipe

    def with_cut(self, recipe: Recipe, processes: Processes) -> Recipe:
        """Return the `recipe` with the run's cut into stages. All `processes` call."""
        return recipe

    def begun(self, engine: Engine) -> None:
        """Take note of an `engine` that is complete."""

    def restore(self, engine: Engine) -> Optional[Progression]:
        """Take an `engine` back to where the run was; None where nobody remembers. All call."""
        return None

    def facts(self, engine: Engine) -> Dict[str, int]:
        """Return what the run folder notes of this start of an `engine`."""
        return {}

    def check(self, engine: Engine) -> None:
        """Raise Regroup unless the update that an `engine` just made was a whole one."""

    def keep(self, engine: Engine, progression: Progression) -> None:
        """Remember the state of an `engine` and the `progression` after a step."""

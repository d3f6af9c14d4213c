"""Progress of a sweep: lines for people, and the files that show its state."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Dict, Optional

from tools.sweeping import leaderboard, picture, winner
from tools.sweeping.candidates import Candidates
from tools.sweeping.folder import SweepFolder
from tools.sweeping.trials import Record

if TYPE_CHECKING:
    from tools.sweeping.study import Study

_PICTURE_SECONDS = 30.0  # between two pictures: to draw one takes a second


class Report:
    """Lines for people, with the table below them in a terminal; leaderboard.csv, best.yaml, importance.png."""

    def __init__(self, found: Candidates, study: Study, folder: SweepFolder):
        self._found, self._study, self._folder = found, study, folder
        self._drawn = time.monotonic()
        self._live: Any = None

    def __enter__(self) -> Report:
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(self._table(), transient=True, auto_refresh=False)
            self._live.start()
        self._write()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def changed(self, line: str, record: Optional[Record]) -> None:
        """Args: line: for people, if there is anything to say. record: the trial that has ended, if one has."""
        if line and self._live is not None:
            self._live.console.print(line, highlight=False, markup=False)
        elif line:
            print(line, flush=True)
        self._write()
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        if record is not None and time.monotonic() - self._drawn > _PICTURE_SECONDS:
            self._draw()

    def last(self) -> Dict[str, Any]:
        """Writes all files, prints the table, and returns all of it as data."""
        self._write()
        importances = self._draw()
        records, definition = self._study.records(), self._found.sweep.definition
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 120).print(self._table())
        best = leaderboard.best(records, definition)
        rows = leaderboard.rows(records, definition)
        files = {"study": self._folder.study, "leaderboard": self._folder.leaderboard, "picture": self._folder.picture}
        if best is not None:
            files["best"] = self._folder.best
        return {
            "sweep": self._found.sweep.name,
            "folder": str(self._folder.path),
            "metric": definition.metric,
            "direction": definition.direction,
            "sampler": definition.sampler,
            "seed": definition.seed,
            "counts": leaderboard.counts(records),
            "best": None if best is None else next(row for row in rows if row["trial"] == best.number),
            "leaderboard": rows,
            "importances": importances,
            "files": {name: str(path) for name, path in files.items()},
        }

    def _write(self) -> None:
        records, definition = self._study.records(), self._found.sweep.definition
        leaderboard.write(self._folder.leaderboard, records, definition)
        best = leaderboard.best(records, definition)
        if best is not None:
            winner.write(self._folder, self._found, records, best)

    def _draw(self) -> Optional[Dict[str, float]]:
        importances = self._study.importances()
        picture.draw(
            self._folder.picture,
            self._found.sweep.name,
            self._study.records(),
            self._found.sweep.definition,
            importances,
        )
        self._drawn = time.monotonic()
        return importances

    def _table(self) -> Any:
        return leaderboard.table(self._study.records(), self._found.sweep.definition)

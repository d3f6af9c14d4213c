"""Starts a run in the state of another run's checkpoint: weights, optimizer, averages, and position
in the data.

The new run is an ordinary one, with its own recipe and folder. The folder gets a checkpoint as if
the new run had been stopped at that step, so that train.py resumes it. Its rates, its batches above
`batch.global` and its seed may differ from those of the other run; what the state belongs to
(model, optimizer, averages, images, `batch.global`, type of the weights) may not.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from common.errors import CheckpointError
from common.files import write_text
from recipe import loading
from recipe.batch import output_folder
from recipe.config import Recipe
from training.checkpoint import CheckpointFolder, load
from training.progression import Progression
from training.run_folder import CONFIG, DECISIONS


def begin(run: Path, step: int, recipe: Recipe) -> Path:
    """Make the run folder of `recipe`, to be resumed at `step` in the state that another run had.

    The configuration is written last: a folder without it was cut off, and may be begun again.

    Args:
        run: folder of the other run.
        step: of its checkpoint: steps of `batch.global` images done.
        recipe: of the new run, resolved, with its folder.

    Returns:
        The folder of the new run.

    Raises:
        CheckpointError: the other run has no checkpoint of that step, or a damaged one.
        OSError: the folder cannot be written.
    """
    source = CheckpointFolder(run / "checkpoints", keep_last=2, keep_best=True)
    manifest = source.manifest(step)
    if manifest is None:
        raise CheckpointError(
            f"{source.path(step)}: no such checkpoint; restore it with all files of its number"
        )
    content = load(source.path(step), manifest)
    before = Progression(**content["progression"])
    # Sums, scores and times are the other run's: only what later steps are computed from goes along.
    progression = Progression(
        step=step,
        images_digest=before.images_digest,
        rounding=before.rounding,
    )
    content.update(recipe=loading.dump(recipe), progression=dataclasses.asdict(progression))
    # One state at a time: together they may take as much memory as all replicas.
    states = (source.replica_state(step, replica) for replica in range(len(manifest.replicas)))
    folder = Path(output_folder(recipe))
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = CheckpointFolder(folder / "checkpoints", keep_last=2, keep_best=False)
    checkpoints.save(step, content, top1=None, replica_states=states)
    # Cuts and kernels that the other run has measured: others could round differently.
    if (run / DECISIONS).exists():
        shutil.copyfile(run / DECISIONS, folder / DECISIONS)
    write_text(folder / CONFIG, loading.dump(recipe))
    return folder


def is_begun(folder: Path) -> bool:
    """Return whether `begin` has made this folder whole."""
    return (folder / CONFIG).exists()

"""What all ranks of a run must have alike before they begin."""

from __future__ import annotations

from common.errors import ConfigError
from parallel.processes import Processes
from recipe import loading
from recipe.config import Recipe
from training.run_folder import first_difference


def check_one_recipe(recipe: Recipe, processes: Processes) -> None:
    """Check that all ranks have the same recipe; only hosts' own files can be the cause.

    Args:
        recipe: of this rank.
        processes: of the run; all ranks call.

    Raises:
        ConfigError: a rank has another one than the first; on all ranks, the main one says why.
    """
    if processes.topology.world == 1:
        return
    # The whole recipe: also a key that may change between sessions must not differ between ranks.
    texts = processes.gather(loading.dump(recipe))
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
    if other is None:
        return
    one = loading.loads(texts[0], "rank 0")
    two = loading.loads(texts[other], f"rank {other}")
    difference = first_difference(one, two) or first_difference(one, two, free={})
    difference = difference.replace(" there", " on rank 0")
    fault = f"rank {other} has another recipe than rank 0: {difference}"
    message = f"{fault}; give all hosts the same files and overrides"
    # All ranks find it, one prints it.
    raise ConfigError(message if processes.topology.is_main else "")

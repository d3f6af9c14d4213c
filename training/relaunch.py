"""Starts poprun again, in the place of this process, with flags that fit the recipe.

`poprun --num-replicas 64 python train.py ...` gives each replica one IPU and starts one process for
all of them, which a recipe of two stages cannot use. The recipe says what it needs, so the line is
corrected, printed and started.

This relies on three things, tried with a stand-in for poprun only:

- Linux shows the command line of poprun, an ancestor of this process, in /proc. Where it is not
  found (MPI started this process on another host, say) flags other than ours are lost from the
  corrected line.
- mpirun refuses to start within another one, which it recognises by variables. Those are left out,
  also the ones of OMPI_MCA_ that a user may have set: they cannot be told apart from mpirun's own.
- mpirun may bind a process to few cores, which its children inherit: they get poprun's own again.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Dict, List, Mapping, NamedTuple, NoReturn, Optional, Sequence, Set

from common import cores
from common.credentials import masked
from common.errors import ConfigError
from parallel import launchers
from recipe import batch
from recipe.config import Recipe
from recipe.ipu import poprun
from training import stopping

# Beginnings of the variables by which mpirun recognises that it runs within another one.
_OF_MPIRUN = ("OMPI_", "ORTE_", "PRTE_")


class Ancestor(NamedTuple):
    """The poprun that started this process.

    words: its command line, "poprun" first.
    cores: those that it may use.
    """

    words: List[str]
    cores: Set[int]


def settle(recipe: Recipe, environment: Mapping[str, str] = os.environ) -> None:
    """Start poprun anew where what it started does not fit the recipe.

    Returns where it did not start this process, or where it fits; else it does not return.

    Args:
        recipe: one with `run.device: ipu`, else nothing is done.
        environment: with poprun's variables.

    Raises:
        ConfigError: what was started does not fit, and poprun was given more than a number of
            replicas, or another one than the recipe (so that the user has chosen), or
            `ipu.relaunch` is false, or there is no poprun; with the whole corrected line. The text
            is empty in all instances but the first.
    """
    # Variables of an outer job may be left in the environment of a run on CPUs.
    launched = poprun.launched_by(environment) if recipe.run.device == "ipu" else None
    if launched is None:
        return
    fault = poprun.fault(recipe, launched)
    if not fault:
        return
    # The line that fits.
    ancestor = _find(os.getppid())
    words = ancestor.words if ancestor else []
    usable = ancestor.cores if ancestor else set(range(os.cpu_count() or 1))
    flags = poprun.fitting_flags(recipe, launched.replicas, cores.within_quota(len(usable)))
    words = corrected(words, flags, sys.argv)
    shown = shlex.join(map(masked, words))
    # It is started only if the user has chosen nothing that it would change. There is no endless
    # loop: what fits is not started again.
    program = shutil.which("poprun")
    has_chosen = recipe.parallel.replicas not in (None, launched.replicas)
    if launched.by_default and recipe.ipu.relaunch and program and not has_chosen:
        batch.divide(recipe, launched.replicas)  # refuses what the next start would refuse
        print(f"{fault}; started again as: {shown}", flush=True)
        _become(program, words, without_launcher(environment), usable)
    # All instances find the same fault by the same variables: one of them prints it.
    message = f"{fault}; start it as `{shown}`{poprun.other_remedy(recipe, launched)}"
    raise ConfigError(message if poprun.is_first_instance(environment) else "")


def corrected(words: Sequence[str], flags: Sequence[str], arguments: Sequence[str]) -> List[str]:
    """Return poprun's command line with other flags.

    Args:
        words: the line as it was, with the command; or nothing where it is not known.
        flags: pairs of a flag and its value, which replace those of the same name. No command has
            such arguments.
        arguments: the script that poprun started, as it was typed, and its arguments.
    """
    if not words:
        return ["poprun", *flags, sys.executable, *arguments]
    # Both forms occur: --flag=value and --flag value.
    names = flags[::2]
    remaining = list(words[1:])
    others = []
    while remaining:
        word = remaining.pop(0)
        name, equals, _ = word.partition("=")
        if name not in names:
            others.append(word)
        elif not equals and remaining:
            remaining.pop(0)  # its value
    return ["poprun", *flags, *others]


def without_launcher(environment: Mapping[str, str]) -> Dict[str, str]:
    """Return the variables in `environment` that are neither a launcher's nor MPI's."""
    remaining = launchers.without(environment)
    return {name: value for name, value in remaining.items() if not name.startswith(_OF_MPIRUN)}


def _find(process: int) -> Optional[Ancestor]:
    """Return poprun among a process and its ancestors; None where there is none, or no /proc."""
    while process > 1:
        folder = Path(f"/proc/{process}")
        try:
            line = (folder / "cmdline").read_bytes().decode(errors="surrogateescape")
            status = (folder / "stat").read_text(errors="replace")
            usable = os.sched_getaffinity(process)
        except OSError:
            return None
        words = line.rstrip("\0").split("\0")
        # poprun is a script, whose interpreter may stand before it.
        for position, word in enumerate(words[:2]):
            if os.path.basename(word) == "poprun":
                return Ancestor(["poprun", *words[position + 1 :]], usable)
        # The parent is the second field behind the name, which stands in parentheses and may have
        # any characters: proc(5).
        process = int(status.rpartition(")")[2].split()[1])
    return None


def _become(
    program: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    usable: Set[int],
) -> NoReturn:
    """Replace this process by another program, or end it if a signal came before.

    Args:
        program: its path.
        words: of its command line.
        environment: its variables.
        usable: cores that it may use.
    """
    if stopping.let_go():
        raise SystemExit(launchers.stopped_early())
    # execve keeps the process and its number, for which a scheduler waits.
    with contextlib.suppress(OSError):  # not allowed: they stay as they are
        os.sched_setaffinity(0, usable)
    os.execve(program, list(words), dict(environment))

"""Starts poprun again, in the place of this process, where it was started with its defaults and the recipe needs more.

`poprun --num-replicas 64 python train.py ...` gives each replica one IPU and starts one process for all of them, which
a recipe of two stages cannot use. The recipe says what it needs, so the line is corrected, printed and started.

What this relies on, tried with a stand-in for poprun only:
- Linux shows the command line of poprun, an ancestor of this process, in /proc. Where it is not found (MPI started
  this process on another host, say) flags other than ours are lost from the corrected line.
- mpirun refuses to start within another one, which it knows by variables. Those are left out, also the ones of
  OMPI_MCA_ that a user may have set: they cannot be told apart from mpirun's own.
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

_OF_MPIRUN = ("OMPI_", "ORTE_", "PRTE_")  # how variables begin by which it knows that it runs within another


class Ancestor(NamedTuple):
    """The poprun that started this process. words: its command line, "poprun" first. cores: those that it may use."""

    words: List[str]
    cores: Set[int]


def settle(recipe: Recipe, environment: Mapping[str, str] = os.environ) -> None:
    """Return where poprun did not start this process, or what it started fits the recipe; else start it anew.

    Does not return where it starts poprun in the place of this process.

    Args:
        recipe: one with `run.device: ipu`, else nothing is done.
        environment: with poprun's variables.

    Raises:
        ConfigError: what was started does not fit, and poprun was given more than a number of replicas, or another one
            than the recipe (so that the user has chosen), or `ipu.relaunch` is false, or there is no poprun; with the
            whole corrected line. The text is empty in all instances but the first.
    """
    launched = poprun.launched_by(environment) if recipe.run.device == "ipu" else None
    found = poprun.fault(recipe, launched) if launched else ""
    if not found:
        return
    ancestor = _find(os.getppid())
    own = ancestor.cores if ancestor else set(range(os.cpu_count() or 1))
    flags = poprun.fitting_flags(recipe, launched.replicas, cores.within_quota(len(own)))
    words = corrected(ancestor.words if ancestor else [], flags, sys.argv)
    shown = shlex.join(map(masked, words))
    program = shutil.which("poprun")
    chosen = recipe.parallel.replicas not in (None, launched.replicas)  # by the recipe, against the command line
    if launched.by_default and recipe.ipu.relaunch and program and not chosen:
        batch.divide(recipe, launched.replicas)  # refuses what the next start would refuse
        print(f"{found}; started again as: {shown}", flush=True)
        _become(program, words, without_launcher(environment), own)
    # All instances find the same fault by the same variables: one of them prints it.
    is_first = poprun.is_first_instance(environment)
    message = f"{found}; start it as `{shown}`{poprun.other_remedy(recipe, launched)}"
    raise ConfigError(message if is_first else "")


def corrected(words: Sequence[str], flags: Sequence[str], arguments: Sequence[str]) -> List[str]:
    """Return poprun's command line with other flags.

    Args:
        words: the line as it was, with the command; or nothing where it is not known.
        flags: pairs of a flag and its value, which replace those of the same name. No command has such arguments.
        arguments: the script that poprun started, as it was typed, and its arguments.
    """
    if not words:
        return ["poprun", *flags, sys.executable, *arguments]
    given = list(words[1:])
    kept = []
    while given:
        word = given.pop(0)
        name, equals, _ = word.partition("=")
        if name not in flags[::2]:
            kept.append(word)
        elif not equals and given:
            given.pop(0)  # its value
    return ["poprun", *flags, *kept]


def without_launcher(environment: Mapping[str, str]) -> Dict[str, str]:
    """Return the variables that are neither a launcher's nor MPI's."""
    remaining = launchers.without(environment)
    return {name: value for name, value in remaining.items() if not name.startswith(_OF_MPIRUN)}


def _find(process: int) -> Optional[Ancestor]:
    """Return poprun among a process and its ancestors; None where there is none, or no /proc."""
    while process > 1:
        try:
            text = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="surrogateescape")
            fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
            allowed = os.sched_getaffinity(process)
        except OSError:
            return None
        words = text.rstrip("\0").split("\0")
        # A script has its interpreter before it.
        start = next((number for number, word in enumerate(words[:2]) if os.path.basename(word) == "poprun"), None)
        if start is not None:
            return Ancestor(["poprun", *words[start + 1 :]], allowed)
        process = int(fields[1])  # the parent
    return None


def _become(program: str, words: Sequence[str], environment: Mapping[str, str], cores: Set[int]) -> NoReturn:
    """Replace this process by `program`, which may use `cores`."""
    with contextlib.suppress(OSError):  # not allowed: they stay as they are
        os.sched_setaffinity(0, cores)
    os.execve(program, list(words), dict(environment))

"""What poprun started, as its variables tell it, and the flags that would have fitted the recipe.

Graphcore's poprun starts the processes ("instances") of a run on IPUs. Its source is closed;
docs/ipu.md, chapter 8, names what its variables and defaults were taken from.
"""

from __future__ import annotations

from typing import List, Mapping, NamedTuple, Optional

from common.errors import ConfigError
from common.text import count
from recipe.config import Recipe

MOST_IPUS = 64  # of one process (popart_compiler/source/CompilerImpl.cpp)
FLAGS = ("--num-replicas", "--ipus-per-replica", "--num-instances")
# Of an instance, besides its workers: train.py, and PopTorch's own that collects images.
_OTHER_PROCESSES = 2


class Launched(NamedTuple):
    """Processes that poprun started.

    replicas: of the run. served: those of this process. ipus_per_replica: IPUs of each.
    """

    replicas: int
    served: int
    ipus_per_replica: int

    @property
    def by_default(self) -> bool:
        """True where poprun was given nothing but a number of replicas: one instance, one IPU a
        replica.
        """
        return self.served == self.replicas and self.ipus_per_replica == 1


def launched_by(environment: Mapping[str, str]) -> Optional[Launched]:
    """Return what poprun started by its variables in `environment`; None where it did not start
    this process.

    Raises:
        ConfigError: a variable is no number above 0.
    """
    replicas = _number(environment, "POPDIST_NUM_TOTAL_REPLICAS")
    served = _number(environment, "POPDIST_NUM_LOCAL_REPLICAS")
    stages = _number(environment, "POPDIST_NUM_IPUS_PER_REPLICA")
    if replicas is None or served is None or stages is None:
        return None
    return Launched(replicas, served, stages)


def stages_of_launcher(environment: Mapping[str, str]) -> Optional[int]:
    """Return the IPUs that poprun gives each replica by `environment`; None where it did not start
    this process.

    Raises:
        ConfigError: the variable is no number above 0.
    """
    return _number(environment, "POPDIST_NUM_IPUS_PER_REPLICA")


def is_first_instance(environment: Mapping[str, str]) -> bool:
    """Return whether by `environment` this process is poprun's first instance, or was not started
    by poprun.
    """
    return environment.get("POPDIST_REPLICA_INDEX_OFFSET", "0") == "0"


def _number(environment: Mapping[str, str], name: str) -> Optional[int]:
    """Return a variable's number; None where it is not set. Raises ConfigError."""
    text = environment.get(name)
    if text is None:
        return None
    # isdecimal, as int() takes " 1", "+1" and "1_0", too.
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(
            f"{name} {text!r} in the environment is no number above 0; start by ./run_pod.sh"
        )
    return int(text)


def fault(recipe: Recipe, launched: Launched) -> str:
    """Return why the processes that poprun `launched` do not fit the recipe; an empty text where
    they fit.
    """
    # Stages first: how many replicas there may be depends on them.
    stages = recipe.parallel.stages
    wanted = recipe.parallel.replicas
    if launched.ipus_per_replica != stages:
        devices = count(launched.ipus_per_replica, "IPU")
        return f"poprun gives each replica {devices}, but parallel.stages is {stages}"
    if wanted is not None and wanted != launched.replicas:
        return f"poprun started {launched.replicas} replicas, but parallel.replicas is {wanted}"
    return fault_of_pod(launched.replicas, stages, recipe.ipu.pod) or fault_of_instance(
        launched.served, stages
    )


def fault_of_pod(replicas: int, stages: int, pod: Optional[int]) -> str:
    """Return why a pod cannot hold so many replicas; an empty text where it can.

    Args:
        replicas: of the run.
        stages: IPUs of each.
        pod: IPUs of the pod; None where that is not known.
    """
    if pod is None or replicas * stages <= pod:
        return ""
    return f"{replicas} replicas x {stages} IPUs are more than the {pod} of ipu.pod"


def fault_of_instance(served: int, stages: int) -> str:
    """Return why one process cannot have the IPUs of so many replicas; an empty text where it can.

    Args:
        served: replicas of the process.
        stages: IPUs of each.
    """
    if is_power(served) and served * stages <= MOST_IPUS:
        return ""
    product = f"{served} replicas x {stages} IPUs = {served * stages}"
    return f"one process would have {product}, but PopTorch takes a power of two up to {MOST_IPUS}"


def check_launched(recipe: Recipe, launched: Launched) -> None:
    """Raise ConfigError, with the flags that fit, where the processes that poprun `launched` do not
    fit the recipe.
    """
    reason = fault(recipe, launched)
    if reason:
        flags = " ".join(fitting_flags(recipe, launched.replicas))
        raise ConfigError(f"{reason}; give poprun {flags}{other_remedy(recipe, launched)}")


def check_served(served: int, stages: int, replicas: int) -> None:
    """Raise ConfigError where one process cannot have the IPUs of so many replicas.

    Args:
        served: replicas of the process.
        stages: IPUs of each.
        replicas: of the run.
    """
    reason = fault_of_instance(served, stages)
    if reason:
        instances = fitting_instances(replicas, stages)
        raise ConfigError(f"{reason}; start several by poprun --num-instances {instances}")


def other_remedy(recipe: Recipe, launched: Launched) -> str:
    """Return the words that offer a key of the recipe in the place of other flags; an empty text
    where none would do.

    Args:
        recipe: of the run.
        launched: what poprun started.
    """
    if launched.ipus_per_replica != recipe.parallel.stages:
        return ", or use parallel.stages=auto, which takes what there is"
    if recipe.parallel.replicas not in (None, launched.replicas):
        return ", or use parallel.replicas=auto"
    return ""


def fitting_flags(recipe: Recipe, replicas: int, cores: int = 1) -> List[str]:
    """Return the flags of poprun that fit the recipe.

    Args:
        recipe: of the run.
        replicas: how many were started; a number in the recipe comes before it.
        cores: of the host; see `fitting_instances`.
    """
    stages = recipe.parallel.stages
    replicas = recipe.parallel.replicas or replicas
    if recipe.ipu.pod is not None:
        replicas = min(replicas, max(1, recipe.ipu.pod // stages))
    instances = fitting_instances(
        replicas, stages, cores // (recipe.data.workers + _OTHER_PROCESSES)
    )
    flags = []
    for flag, value in zip(FLAGS, (replicas, stages, instances)):
        flags += [flag, str(value)]
    return flags


def fitting_instances(replicas: int, stages: int, wanted: int = 1) -> int:
    """Return a number of instances that divides the replicas so that PopTorch takes what each of
    them has.

    Of the possible numbers the largest that is not above `wanted`, as each instance reads images
    for its own replicas; if all are, the smallest.

    Args:
        replicas: of the run.
        stages: IPUs of each replica.
        wanted: as many instances as the host has processors for.
    """
    divisors = [divisor for divisor in range(1, replicas + 1) if replicas % divisor == 0]
    possible = [
        instances for instances in divisors if not fault_of_instance(replicas // instances, stages)
    ]
    affordable = [instances for instances in possible if instances <= wanted]
    # None is possible where a single replica needs more IPUs than a process may have.
    return affordable[-1] if affordable else min([*possible, replicas])


def is_power(number: int) -> bool:
    """Return whether `number`, above 0, is a power of two."""
    return number & (number - 1) == 0  # it has a single bit, which this clears

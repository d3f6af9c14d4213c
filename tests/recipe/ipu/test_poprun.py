"""What poprun started against what a recipe needs, and the flags that would have fitted."""

import pytest

from common.errors import ConfigError
from recipe.ipu import poprun
from recipe.ipu.poprun import Launched
from recipe.loading import load
from tests.conftest import QUICKSTART

VARIABLES = {
    "POPDIST_NUM_TOTAL_REPLICAS": "64",
    "POPDIST_NUM_LOCAL_REPLICAS": "16",
    "POPDIST_NUM_IPUS_PER_REPLICA": "2",
    "POPDIST_REPLICA_INDEX_OFFSET": "16",
}


def two_stages(*overrides):
    fixed = ("run.device=ipu", "batch.micro=4", "optimizer.trust=momentum", "parallel.stages=2")
    return load(QUICKSTART, [*fixed, *overrides])


def test_popruns_variables_tell_what_it_started():
    launched = poprun.launched_by(VARIABLES)
    assert (
        launched == Launched(replicas=64, served=16, ipus_per_replica=2) and not launched.by_default
    )
    assert poprun.launched_by({}) is None and poprun.stages_of_launcher({}) is None
    assert poprun.stages_of_launcher(VARIABLES) == 2
    assert not poprun.is_first_instance(VARIABLES)
    assert poprun.is_first_instance({**VARIABLES, "POPDIST_REPLICA_INDEX_OFFSET": "0"})
    assert poprun.is_first_instance({})
    assert Launched(64, 64, 1).by_default and not Launched(64, 32, 1).by_default


@pytest.mark.parametrize("text", ["", "two", "0", "-1"])
def test_variables_that_are_no_numbers_are_refused(text):
    with pytest.raises(ConfigError, match=r"POPDIST_NUM_IPUS_PER_REPLICA .* is no number above 0"):
        poprun.stages_of_launcher({"POPDIST_NUM_IPUS_PER_REPLICA": text})


ONE_IPU = (
    "poprun gives each replica 1 IPU, but parallel.stages is 2; give poprun --num-replicas 64 --ipus-per-replica 2 "
    "--num-instances 2, or use parallel.stages=auto, which takes what there is"
)


@pytest.mark.parametrize(
    ("launched", "overrides", "message"),
    [
        (Launched(8, 8, 2), (), None),
        (Launched(64, 32, 2), (), None),
        (Launched(8, 4, 2), ("parallel.replicas=8",), None),
        # poprun's default is one IPU a replica, which a recipe of two stages cannot use.
        (Launched(64, 64, 1), (), ONE_IPU),
        (
            Launched(64, 64, 2),
            (),
            "one process would have 64 replicas x 2 IPUs = 128, but PopTorch takes a power of two up to 64; "
            "give poprun --num-replicas 64 --ipus-per-replica 2 --num-instances 2",
        ),
        (
            Launched(12, 6, 2),
            (),
            "one process would have 6 replicas x 2 IPUs = 12, but PopTorch takes a power of two up to 64; "
            "give poprun --num-replicas 12 --ipus-per-replica 2 --num-instances 3",
        ),
        (
            Launched(64, 16, 2),
            ("ipu.pod=64",),
            "64 replicas x 2 IPUs are more than the 64 of ipu.pod; give poprun --num-replicas 32 --ipus-per-replica 2 "
            "--num-instances 1",
        ),
        (
            Launched(8, 4, 2),
            ("parallel.replicas=4",),
            "poprun started 8 replicas, but parallel.replicas is 4; give poprun --num-replicas 4 --ipus-per-replica 2 "
            "--num-instances 1, or use parallel.replicas=auto",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_flags_to_paste(launched, overrides, message):
    recipe = two_stages(*overrides)
    if message is None:
        poprun.check_launched(recipe, launched)
        return
    with pytest.raises(ConfigError) as refused:
        poprun.check_launched(recipe, launched)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("replicas", "stages", "wanted", "expected"),
    [
        (64, 2, 1, 2),  # 32 replicas of two IPUs: 64, the most that one process can have
        (64, 2, 20, 16),  # the largest divisor that the host has processors for
        (64, 2, 1000, 64),
        (128, 2, 1, 4),
        (8, 2, 1, 1),
        (12, 1, 1, 3),  # four each: IPUs of a process come in powers of two
        (7, 1, 2, 7),
    ],
)
def test_as_many_instances_as_poptorch_and_the_host_allow(replicas, stages, wanted, expected):
    assert poprun.fitting_instances(replicas, stages, wanted) == expected
    assert not poprun.fault_of_instance(replicas // expected, stages)


def test_an_instance_needs_cores_for_its_workers_and_two_processes_more():
    recipe = two_stages("data.workers=8")
    flags = poprun.fitting_flags(recipe, 64, cores=80)
    assert flags == ["--num-replicas", "64", "--ipus-per-replica", "2", "--num-instances", "8"]

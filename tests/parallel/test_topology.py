"""What this version can spread over: one process, and it says so."""

import pytest

from parallel.topology import Topology, from_environment
from recipe.errors import ConfigError


def test_one_process_serves_the_only_replica(tiny):
    place = from_environment(tiny(), {})
    assert place == Topology(replicas=1, replica=0, world=1)
    assert place.is_main


def test_a_launcher_that_starts_one_process_changes_nothing(tiny):
    assert from_environment(tiny(), {"WORLD_SIZE": "1", "RANK": "0"}) == from_environment(tiny(), {})


def test_one_process_runs_all_stages_itself(tiny):
    assert from_environment(tiny("parallel.stages=2"), {}).world == 1


def test_several_processes_are_refused_before_each_trains_the_same_run(tiny):
    with pytest.raises(ConfigError, match=r"^2 processes were started, .*start train.py once$"):
        from_environment(tiny(), {"WORLD_SIZE": "2"})


def test_a_world_size_that_is_no_number_is_the_users_to_mend(tiny):
    with pytest.raises(ConfigError, match=r"^WORLD_SIZE 'two' .*unset it$"):
        from_environment(tiny(), {"WORLD_SIZE": "two"})


@pytest.mark.parametrize(("stages", "processes"), [(1, 3), (2, 6)])
def test_several_replicas_are_refused_with_the_processes_they_need(tiny, stages, processes):
    """Each stage of each replica is a process of its own: replicas x stages."""
    recipe = tiny("parallel.replicas=3", f"parallel.stages={stages}")
    with pytest.raises(ConfigError, match=rf"parallel.replicas 3 needs {processes} processes.*replicas=auto"):
        from_environment(recipe, {})

"""The double's loader, popdist, horovod and poprun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ipu.conftest import DOUBLE
from tests.ipu.nets import Net, batch, options, weights

pytestmark = [pytest.mark.ipu, pytest.mark.filterwarnings("ignore:Positional args are being deprecated")]
ROOT = Path(__file__).resolve().parents[2]


def loader(poptorch, dataset=range(50), accumulation=2, **values):
    made = options(poptorch, replicas=2, accumulation=accumulation)
    return poptorch.DataLoader(made, list(dataset), **values)


def test_a_batch_is_for_a_whole_call(double):
    for mode in double.DataLoaderMode:
        batches = loader(double, batch_size=3, mode=mode)
        assert batches.combinedBatchSize == 12
        assert [part.tolist() for part in batches] == [list(range(start, start + 12)) for start in (0, 12, 24, 36)]
        batches.terminate()


def test_a_batch_that_is_kept_sees_other_images(double):
    """Its memory is one of three buffers, which the loader's process fills again."""
    batches = iter(loader(double, batch_size=3, dataset=range(60), mode=double.DataLoaderMode.Async))
    kept = next(batches)
    assert kept.tolist() == list(range(12))
    assert [len(next(batches)) for _ in range(4)] == [12] * 4
    assert kept.tolist() == list(range(36, 48))


def test_leftovers_come_where_asked_for(double):
    for mode in double.DataLoaderMode:
        assert [len(part) for part in loader(double, batch_size=3, mode=mode, drop_last=False)] == [12, 12, 12, 12, 2]


def test_a_sampler_chooses_micro_batches(double):
    sampler = [[3, 1], [4, 1], [5, 9], [2, 6], [5, 3]]
    assert [part.tolist() for part in loader(double, batch_sampler=sampler)] == [[3, 1, 4, 1, 5, 9, 2, 6]]
    with pytest.raises(double.Error, match="mutually exclusive with batch_size, shuffle"):
        loader(double, batch_sampler=sampler, batch_size=2)


def test_a_loader_freezes_its_options(double):
    batches = loader(double)
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        batches.options.deviceIterations(2)


def test_rebatching_starts_from_less_than_a_batch(double):
    with pytest.raises(AssertionError, match=r"rebatched_worker_size \(13\) must be <= .*\(\n?12\)"):
        loader(double, batch_size=3, mode=double.DataLoaderMode.AsyncRebatched, rebatched_worker_size=13)


def test_processes_read_different_parts(double):
    parts = []
    for process in range(2):
        made = options(double, accumulation=2).randomSeed(1)
        made.Distributed.configureProcessId(process, 2)
        parts.append([int(item) for part in double.DataLoader(made, list(range(20)), 5, shuffle=True) for item in part])
    assert sorted(parts[0] + parts[1]) == list(range(20))
    made = options(double)
    made.Distributed.configureProcessId(0, 2)
    with pytest.raises(AssertionError, match=r"you must set poptorch.Options.randomSeed\(\)"):
        double.DataLoader(made, list(range(20)), 5, shuffle=True)
    with pytest.raises(double.Error, match="auto_distributed_partitioning=True"):
        double.DataLoader(made, list(range(20)), batch_sampler=[[1]])


def test_a_loader_has_one_accessor(double):
    with pytest.raises(double.Error, match="already uses an AsynchronousDataAccessor"):
        double.AsynchronousDataAccessor(loader(double, mode=double.DataLoaderMode.Async))
    assert [part.tolist() for part in double.AsynchronousDataAccessor([torch.ones(1)], buffer_size=4)] == [[1.0]]


# popdist


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("useIpuId", lambda made: made.useIpuId(1)),
        ("replicationFactor", lambda made: made.replicationFactor(1)),
        ("Distributed.disable", lambda made: made.Distributed.disable()),
        ("Distributed.setEnvVarNames", lambda made: made.Distributed.setEnvVarNames("A", "B")),
        ("Distributed.configureProcessId", lambda made: made.Distributed.configureProcessId(1)),
    ],
)
def test_poprun_decides_replicas_and_processes(double, name, call):
    import popdist.poptorch

    with pytest.raises(RuntimeError, match=re.escape(f"Cannot call `{name}` with popdist.poptorch.Options")):
        call(popdist.poptorch.Options(ipus_per_replica=2))


def test_without_poprun_there_is_one_instance(double):
    import popdist.poptorch

    made = popdist.poptorch.Options(ipus_per_replica=2)
    assert (made.Distributed.processId, made.Distributed.numProcesses, made.replication_factor) == (0, 1, 1)
    assert not popdist.isPopdistEnvSet()


def test_popdist_options_take_what_poprun_gives(double, monkeypatch):
    import popdist.poptorch

    variables = {"NUM_TOTAL_REPLICAS": 8, "NUM_LOCAL_REPLICAS": 2, "NUM_IPUS_PER_REPLICA": 2, "REPLICA_INDEX_OFFSET": 6}
    for name, value in variables.items():
        monkeypatch.setenv("POPDIST_" + name, str(value))
    made = popdist.poptorch.Options(ipus_per_replica=2)
    assert (made.Distributed.processId, made.Distributed.numProcesses, made.replication_factor) == (3, 4, 2)
    assert not made.clone()._is_frozen
    with pytest.raises(RuntimeError, match="gives a replica 2 IPUs, not 1"):
        popdist.poptorch.Options(ipus_per_replica=1)


# poprun


_TRAIN = """
import sys
import torch, poptorch, popdist, popdist.poptorch, horovod.torch as hvd
from tests.ipu.nets import Net, batch, weights

popdist.init()
hvd.init()
model = Net(poptorch.identity_loss)
made = popdist.poptorch.Options(ipus_per_replica=1)
made.Training.gradientAccumulation(2)
executor = poptorch.trainingModel(model, made, poptorch.optim.SGD(model.parameters(), lr=0.1))
inputs, labels = batch(16)
mine = torch.arange(16).chunk(popdist.getNumInstances())[popdist.getInstanceIndex()]
executor(inputs[mine], labels[mine])
found = weights(executor)
assert hvd.allgather(torch.full((1 + hvd.rank(),), hvd.rank())).tolist() == [0, 1, 1] and hvd.size() == 2
assert popdist.execute_on_instances({1}, lambda: 5) == (5 if hvd.rank() else None)
torch.save(found, sys.argv[1] + str(popdist.getInstanceIndex()))
"""


def poprun(*arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(DOUBLE), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(DOUBLE / "poprun"), *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, text=True, capture_output=True, timeout=120)


@pytest.mark.multiprocess
def test_instances_share_their_gradients(double, tmp_path):
    """Two instances of two replicas do what one process of four does."""
    done = poprun("--num-replicas", "4", "--num-instances", "2", sys.executable, "-c", _TRAIN, f"{tmp_path}/weights")
    assert done.returncode == 0, done.stderr
    model = Net(double.identity_loss)
    made = options(double, replicas=4, accumulation=2)
    executor = double.trainingModel(model, made, double.optim.SGD(model.parameters(), lr=0.1))
    executor(*batch(16))
    for instance in range(2):
        found = torch.load(tmp_path / f"weights{instance}")
        for name, expected in weights(executor).items():
            torch.testing.assert_close(found[name], expected)


@pytest.mark.multiprocess
def test_poprun_ends_with_the_worst_exit_code():
    script = "import os, sys; sys.exit(3 * int(os.environ['POPDIST_LOCAL_INSTANCE_INDEX']))"
    assert poprun("--num-replicas", "2", "--num-instances", "2", sys.executable, "-c", script).returncode == 3


@pytest.mark.multiprocess
def test_poprun_starts_one_replica_of_one_ipu_unless_told():
    script = "import popdist as p; print(p.getNumTotalReplicas(), p.getNumIpusPerReplica(), p.isPopdistEnvSet())"
    assert poprun(sys.executable, "-c", script).stdout == "1 1 True\n"
    assert poprun("--ipus-per-replica", "2", sys.executable, "-c", script).stdout == "1 2 True\n"

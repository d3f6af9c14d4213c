"""What belongs to one replica is saved with the checkpoint of a run, and each replica goes on with its own."""

import pytest
import torch

import evaluate
from engines import factory
from engines.torch_engine import TorchEngine
from recipe.errors import CheckpointError
from tests.training.conftest import SIX_STEPS_AN_EPOCH, states
from tests.training.scripted import EMPTY, ScriptedEngine
from training import checkpoint, weights
from training.checkpoint import CheckpointFolder
from training.run import run

REPLICAS = 3


@pytest.mark.parametrize("content", [{"format": 1, "state": {}}, {"replica_format": 0, "state": {}}, [1, 2]])
def test_a_replicas_file_is_no_weights_and_no_other_file_is_one(folder, content):
    folder().save(1, {"progression": {"step": 1}}, None, states(1, 1))
    path = folder().replica_path(1, 0)
    with pytest.raises(CheckpointError, match="not weights"):
        weights.read(str(path))
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        checkpoint.load(path)
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="damaged, or not of a checkpoint of this program"):
        folder().replica_state(1, 0)


class _Validation(list):
    """One batch, again and again."""

    def close(self):
        pass


class _Fed(ScriptedEngine):
    """A scripted engine that is fed."""

    def training_batches(self, source, steps):
        return (EMPTY for _ in steps)

    def evaluation_batches(self, source, images):
        return _Validation([EMPTY])


class _Killed(Exception):
    pass


def kill_at(number):
    def before(step):
        if step == number:
            raise _Killed

    return before


@pytest.fixture
def session(tiny, tmp_path, monkeypatch):
    """session(engine, *overrides): a session of a run of 12 steps by that engine, with a checkpoint every 2."""

    def start(engine, *overrides):
        recipe = tiny(
            *SIX_STEPS_AN_EPOCH, "checkpoint.every_epochs=0.034", f"run.output={tmp_path / 'run'}", *overrides
        )
        monkeypatch.setattr(factory, "create", lambda *_: engine)
        run(recipe)

    return start


def residuals_after(steps):
    """What each replica has after so many steps, first value."""
    return [number * sum(step * 0.5 ** (steps - 1 - step) for step in range(steps)) for number in (1, 2, 3)]


def test_a_resumed_run_goes_on_with_what_each_replica_had(session, tmp_path, capsys):
    """Killed before step 8 and once more: a residual that began again at 0 would differ at the end. The halves and
    sums are exact in float32."""
    for kill in (7, 9):
        with pytest.raises(_Killed):
            session(_Fed(kill_at(kill), replicas=REPLICAS))
    assert "resuming at step 6 of 12" in capsys.readouterr().out
    last = _Fed(replicas=REPLICAS)
    session(last)
    assert last.steps == list(range(12))
    assert [residual.tolist() for residual in last.residuals] == [[value] * 5 for value in residuals_after(12)]
    checkpoints = CheckpointFolder(tmp_path / "run" / "checkpoints", 9, True)
    assert [manifest.step for manifest in checkpoints.manifests()] == [10, 12]
    for replica, value in enumerate(residuals_after(10)):
        assert checkpoints.replica_state(10, replica)["residual"][0] == value


def test_an_engine_without_such_states_refuses_them(session):
    """It would lose what the replicas have not yet sent."""
    with pytest.raises(_Killed):
        session(_Fed(kill_at(7), replicas=REPLICAS))
    with pytest.raises(CheckpointError, match="of other replicas: 3 replicas have a state of their own there, none"):
        session(_Fed())


def test_a_run_without_them_is_scored_and_not_resumed(tiny, tmp_path, monkeypatch, capsys):
    """The residuals are made up beside a real engine; evaluate.py needs only its weights."""
    place = f"run.output={tmp_path / 'run'}"
    monkeypatch.setattr(TorchEngine, "peak_flops", lambda engine: 1e12)
    monkeypatch.setattr(TorchEngine, "replica_states", lambda engine: states(1, REPLICAS))
    run(tiny("run.steps=3", place))
    for path in (tmp_path / "run" / "checkpoints").glob("*.replica-*"):
        path.unlink()
    (tmp_path / "run" / "metrics.jsonl").unlink()  # as of a run that is not finished
    assert evaluate.main(["--checkpoint", str(tmp_path / "run")]) == 0
    assert "top1" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="no older checkpoint is whole either"):
        run(tiny("run.steps=3", place))

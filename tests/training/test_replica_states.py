"""State of each replica is saved with the checkpoint of a run, and each replica resumes with its own."""

import pytest

import evaluate
from engines import factory
from engines.torch_engine import TorchEngine
from recipe.errors import CheckpointError
from tests.training.conftest import SIX_STEPS_AN_EPOCH, states
from tests.training.scripted import EMPTY, ScriptedEngine
from training.run import run


class _Fed(ScriptedEngine):
    """A scripted engine with batches; an exception before step `killed`."""

    def __init__(self, killed=None, replicas=0):
        super().__init__(before=lambda step: 1 / (step != killed), replicas=replicas)

    def training_batches(self, source, steps):
        return (EMPTY for _ in steps)

    def evaluation_batches(self, source, images):
        return type("Batches", (list,), {"close": lambda batches: None})([EMPTY])


@pytest.fixture
def session(tiny, tmp_path, monkeypatch):
    """session(engine): a session of a run of 12 steps by that engine, with a checkpoint every 2."""
    recipe = tiny(*SIX_STEPS_AN_EPOCH, "checkpoint.every_epochs=0.034", f"run.output={tmp_path / 'run'}")

    def start(engine):
        monkeypatch.setattr(factory, "create", lambda *_: engine)
        run(recipe)

    return start


def test_a_resumed_run_goes_on_with_what_each_replica_had(session, capsys):
    """Killed before step 8 and once more: a residual that began again at 0 would differ at the end.

    An engine without such states is refused. Halves and sums are exact in float32.
    """
    for killed in (7, 9):
        with pytest.raises(ZeroDivisionError):
            session(_Fed(killed, replicas=3))
    assert "resuming at step 6 of 12" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="of other replicas: 3 replicas have a state of their own there, none"):
        session(_Fed())
    last = _Fed(replicas=3)
    session(last)
    assert last.steps == list(range(12))
    expected = [number * sum(step * 0.5 ** (11 - step) for step in range(12)) for number in (1, 2, 3)]
    assert [residual.tolist() for residual in last.residuals] == [[value] * 5 for value in expected]


def test_a_run_without_them_is_scored_and_not_resumed(tiny, tmp_path, monkeypatch, capsys):
    """The residuals are made up beside a real engine; evaluate.py needs only its weights."""
    recipe = tiny("run.steps=3", f"run.output={tmp_path / 'run'}")
    monkeypatch.setattr(TorchEngine, "peak_flops", lambda engine: 1e12)
    monkeypatch.setattr(TorchEngine, "replica_states", lambda engine: states(1, 3))
    run(recipe)
    for path in (tmp_path / "run" / "checkpoints").glob("*.replica-*"):
        path.unlink()
    (tmp_path / "run" / "metrics.jsonl").unlink()  # as of a run that is not finished
    assert evaluate.main(["--checkpoint", str(tmp_path / "run")]) == 0
    assert "top1" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="no older checkpoint is whole either"):
        run(recipe)

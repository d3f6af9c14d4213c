"""Fixtures of tests that call train.py in this process."""

import signal

import pytest

import train
from engines.torch_engine import TorchEngine
from tests.conftest import QUICKSTART, TINY
from training.metrics import read_events

DONE = 0
FAILED = 1
WRONG_INPUT = 2
STOPPED = 75
# Four steps, a checkpoint after each.
SHORT = (
    *TINY,
    "model.image_size=8",
    "batch.micro=24",
    "run.steps=4",
    "checkpoint.every_epochs=0.001",
)


class Command:
    """train.py with the tiny recipe and a run folder, called in this process."""

    def __init__(self, folder, capfd):
        self.folder = folder
        self._capfd = capfd

    def __call__(self, *overrides, output=None, recipe=QUICKSTART):
        """Exit code, lines of stdout, lines of stderr."""
        self._capfd.readouterr()
        code = train.main(
            ["--config", str(recipe), *SHORT, f"run.output={output or self.folder}", *overrides]
        )
        captured = self._capfd.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    def refuses(self, *overrides, **keywords):
        """The one line of a call that must be refused and leave every file as it was."""
        before = files(self.folder.parent)
        code, _, errors = self(*overrides, **keywords)
        assert code == WRONG_INPUT and len(errors) == 1, errors
        assert before.items() <= files(self.folder.parent).items()
        return errors[0]


@pytest.fixture
def command(tmp_path, capfd, monkeypatch):
    """The command; without measuring the machine's peak, which enters the utilisation alone."""
    monkeypatch.setattr(TorchEngine, "peak_flops", lambda engine: 1e12)
    return Command(tmp_path / "run", capfd)


def files(folder):
    """{path: content} of all files below, but for the note of the sessions' environments."""
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "environment.json"
    }


def events(folder, kind):
    return read_events(folder)[kind]


def newest(folder):
    return max((folder / "checkpoints").glob("*.pt"))


@pytest.fixture
def before_step(monkeypatch):
    """before_step(number, action, *arguments): has action(*arguments) called before a step (from 1)
    is done."""
    original = TorchEngine.train_step

    def at(step, action, *arguments):
        def disturbed(engine, micro_batches, update, *rest, **keywords):
            if update.step + 1 == step:
                action(*arguments)
            return original(engine, micro_batches, update, *rest, **keywords)

        monkeypatch.setattr(TorchEngine, "train_step", disturbed)

    return at


@pytest.fixture
def stopped(command, before_step):
    """stopped(step, *overrides): a session that SIGTERM stops at a step."""

    def stop(step, *overrides):
        before_step(step, signal.raise_signal, signal.SIGTERM)
        code, _, errors = command(*overrides)
        before_step(0, None)
        assert (code, errors) == (
            STOPPED,
            [f"SIGTERM: saved at step {step}; the same command resumes"],
        )

    return stop

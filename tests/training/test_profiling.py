"""log.profile and log.memory: the updates that are asked for are recorded, and nothing is left on
afterwards."""

import gzip
import json
import pickle
from collections import Counter

import pytest
import torch

from engines.torch_engine import TorchEngine
from parallel.topology import Topology
from tests import ranks
from tests.conftest import TINY
from tests.training.scripted import ScriptedEngine
from tests.training.test_several_ranks import TWO_STAGES
from training.monitor import Monitor
from training.profiling import MemoryHistory, Recordings, profile_file, snapshot_file

SPANS = ("load 0", "forward 0", "backward 0", "update")


def annotations(path):
    """{name: how often} of what the program itself has named in a profile."""
    with gzip.open(path) as stream:
        events = json.load(stream)["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


@pytest.mark.slow
def test_a_profile_holds_the_updates_from_the_second_on_with_the_spans_of_the_timeline(
    session, tmp_path
):
    """Four updates of two micro batches; also a session's last update ends a profile."""
    recipe = (
        "batch.micro=32",
        "run.steps=4",
        "schedule.warmup_steps=1",
        "log.tensorboard=false",
        "log.every_steps=1",
    )
    out = session(*recipe, "log.profile=2")
    path = tmp_path / "run" / "profile" / "rank-0000.json.gz"
    assert f"profile of updates 2 to 3 of this session: {path}\n" in out
    found = annotations(path)
    assert {name: found[name] for name in found if name.startswith("step ")} == {
        "step 1": 1,
        "step 2": 1,
    }
    assert [found[name] for name in (*SPANS, "forward 1", "forward 2")] == [2, 2, 2, 2, 2, 0]
    out = session(*recipe, "log.profile=9", f"run.output={tmp_path / 'short'}")
    assert "profile of updates 2 to 4 of this session: " in out
    assert annotations(tmp_path / "short" / "profile" / "rank-0000.json.gz")["step 3"] == 1


def test_it_does_not_change_what_is_learned_and_nothing_is_written_without(session, tmp_path):
    recipe = (*TINY, "run.steps=3", "schedule.warmup_steps=1", "log.every_steps=1")
    losses = []
    for folder, override in (("without", "log.profile=0"), ("with", "log.profile=1")):
        session(*recipe, override, f"run.output={tmp_path / folder}")
        events = map(json.loads, (tmp_path / folder / "metrics.jsonl").read_text().splitlines())
        losses.append([event["loss"] for event in events if event["event"] in ("train", "eval")])
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert not (tmp_path / "without" / "profile").exists()


def test_a_run_that_fails_within_a_profile_stops_it_and_writes_none(start, tmp_path):
    running = []

    def fail(step):
        running.append(torch.autograd._profiler_enabled())
        if step == 2:
            raise RuntimeError("mended later")

    with pytest.raises(RuntimeError, match="mended later"):
        start(ScriptedEngine(before=fail), "log.profile=5", f"run.output={tmp_path / 'run'}")
    assert running == [False, True, True] and not torch.autograd._profiler_enabled()
    assert not (tmp_path / "run").exists()


class Memory:
    """torch.cuda.memory, as far as snapshots are concerned; `calls` in their order."""

    def __init__(self, monkeypatch):
        self.calls = []
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self._record)
        # torch 2.0.1
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", self._dump, raising=False)

    def _record(self, enabled="all", **options):
        self.calls.append("begin" if enabled else "end")
        assert enabled is None or options == {"max_entries": 100_000}

    def _dump(self, path):
        self.calls.append("dump")
        with open(path, "wb") as stream:
            pickle.dump({"segments": []}, stream)


@pytest.fixture
def recorded(tiny, tmp_path, monkeypatch):
    """recorded(*overrides, updates=..., error=None, rank=0): the calls, the lines and the name of
    what was written."""

    def record(*overrides, updates=4, error=None, rank=0, device="cuda"):
        memory = Memory(monkeypatch)
        lines = []
        recipe = tiny(f"run.output={tmp_path / 'run'}", *overrides)
        engine = ScriptedEngine()
        engine.topology = Topology(2, 1, rank, rank)
        try:
            folder = tmp_path / "run"
            with MemoryHistory(
                recipe.log, snapshot_file(folder, rank), device, lines.append
            ) as history:
                monitor = Monitor(None, (), lines.append)
                file = profile_file(folder, rank)
                recordings = Recordings(
                    recipe.log.profile, file, engine, monitor=monitor, history=history
                )
                for step in range(updates):
                    with recordings.update(step):
                        memory.calls.append(step)
                        if error is not None and step == 1:
                            raise error
                    recordings.after_update(step == updates - 1)
        except RuntimeError as raised:
            assert raised is error
        return memory.calls, lines, [path.name for path in tmp_path.rglob("*.pickle")]

    return record


def test_memory_is_recorded_from_before_the_first_update_to_the_end_of_the_profiles(
    recorded, tmp_path
):
    calls, (line,), (name,) = recorded("log.memory=true", rank=1)
    assert (calls, name) == (["begin", 0, 1, "dump", "end", 2, 3], "rank-0001.memory.pickle")
    assert line.startswith(
        f"memory up to update 2 of this session: {tmp_path / 'run' / 'profile' / name}, for https:"
    )
    assert recorded("log.memory=true", updates=1)[0] == ["begin", 0, "dump", "end"]
    calls, lines, _ = recorded("log.memory=true", "log.profile=2", device="cuda")
    assert calls == ["begin", 0, 1, 2, "dump", "end", 3] and "up to update 3" in lines[-1]


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory."), ["begin", 0, 1, "dump", "end"]),
        (RuntimeError("something else"), ["begin", 0, 1, "end"]),
    ],
)
def test_a_snapshot_is_written_when_memory_runs_out_and_for_no_other_error(
    recorded, capsys, error, calls
):
    found, lines, names = recorded("log.memory=true", error=error, rank=1)
    assert (found, lines, len(names)) == (calls, [], calls.count("dump"))
    assert ("log.memory: memory ran out: " in capsys.readouterr().out) == ("dump" in calls)


def test_without_the_key_or_without_cuda_there_is_none(recorded):
    assert recorded()[:2] == ([0, 1, 2, 3], [])
    calls, (line,), _ = recorded("log.memory=true", device="cpu")
    assert calls == [0, 1, 2, 3]
    assert (
        line
        == "log.memory: left out; there are snapshots of CUDA memory only, and this device is cpu"
    )


def test_a_run_records_from_before_its_engine_is_built(session, monkeypatch):
    """As if memory ran out while the model is built on a GPU, of which only the word is there."""
    memory = Memory(monkeypatch)
    monkeypatch.setattr("training.run.MemoryHistory", lambda log, file, device, say: MemoryHistory(
        log, file, "cuda", say))  # fmt: skip

    def build(engine):
        memory.calls.append("build")
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(TorchEngine, "_build", build)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        session("log.memory=true", "log.tensorboard=false")
    assert memory.calls == ["begin", "build", "dump", "end"]


@pytest.mark.multiprocess
def test_every_rank_writes_its_own_profile(tmp_path):
    ended = ranks.train(
        2, *ranks.SMALL, *TWO_STAGES, "log.profile=1", f"run.output={tmp_path / 'run'}"
    )
    assert {rank.code for rank in ended} == {0}, ended
    found = [
        annotations(tmp_path / "run" / "profile" / f"rank-{rank:04d}.json.gz") for rank in range(2)
    ]
    assert all(each["step 1"] == each["forward 3"] == each["backward 3"] == 1 for each in found)
    assert [each["load 3"] for each in found] == [1, 0]  # images enter at the first stage

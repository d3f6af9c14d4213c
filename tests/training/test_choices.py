"""What is measured is decided once in a run: sessions that would measure other times go on with
it."""

import functools
import json
import os
import signal

import pytest
import torch

from common.errors import CheckpointError
from engines import micro_batch, tuning
from parallel.processes import Processes
from parallel.topology import Topology
from recipe import loading
from recipe.batch import divide, settled
from tests import ranks
from tests.engines import threads
from tests.engines.test_exchange import pretended
from tests.engines.test_tuning import FASTEST, PLAIN, TIMES, pretend
from training import choices, decisions
from training.elastic import Memory


def test_what_is_kept_is_found_in_its_place_alone_and_a_damaged_file_is_one_line(tmp_path):
    place = {"device": "cpu", "stages": 2, "recompute": ["head"], "virtual_stages": None}
    assert decisions.find(tmp_path, "split", place) is None
    decisions.keep(tmp_path, "split", place, ["head"])
    decisions.keep(tmp_path, "split", {**place, "stages": 3}, ["stem", "head"])
    assert decisions.find(tmp_path, "split", place) == ["head"]
    assert decisions.find(tmp_path, "split", {**place, "stages": 3}) == ["stem", "head"]
    assert decisions.find(tmp_path, "split", {**place, "device": "gpu"}) is None
    assert decisions.find(tmp_path, "engine", place) is None
    for text in ("{", "[3]", '[{"subject": "split"}]', "[" * 200_000):
        (tmp_path / "decisions.json").write_text(text)
        with pytest.raises(
            CheckpointError,
            match=r"decisions.json: damaged or not readable; restore it, or delete it",
        ):
            decisions.find(tmp_path, "split", {})


@pytest.fixture
def on_device(tiny, monkeypatch):
    """on_device(room, recipe): choices.settle_on_device with room for so many images: lines by what
    said them."""

    def measured(room):
        said = []

        def tune(recipe, batch, processes, say, begun):
            said.append(f"kernels with {batch.micro}")
            # the last resort, where none could be measured
            kernels = "triton" if batch.micro <= room else "torch"
            return recipe.model_copy(
                update={"engine": recipe.engine.model_copy(update={"kernels": kernels})}
            )

        def size(recipe, batch, processes, say):
            said.append(f"size from {batch.micro} on with {recipe.engine.kernels}")
            return settled(recipe, min(room, 192))

        monkeypatch.setattr(tuning, "settle", tune)
        monkeypatch.setattr(micro_batch, "settle", size)
        recipe = tiny("batch.micro=auto", "batch.global=768")
        found = choices.settle_on_device(
            recipe, divide(recipe), Processes(Topology(), torch.device("cpu")), said.append
        )
        return found.batch.micro, found.engine.kernels, said

    return measured


def test_kernels_are_measured_before_the_size_and_again_where_they_had_too_many_images(on_device):
    assert on_device(10**6) == (192, "triton", ["kernels with 32", "size from 32 on with triton"])
    assert on_device(8) == (
        8, "triton",
        ["kernels with 32", "size from 32 on with torch", "kernels with 8", "size from 8 on with triton"],
    )  # fmt: skip


AUTO = (
    "batch.global=48",
    "batch.micro=auto",
    "run.steps=4",
    "schedule.warmup_steps=1",
    "log.tensorboard=false",
)


def test_a_run_keeps_the_micro_batch_that_it_began_with(session, tmp_path, monkeypatch):
    """Begun on a CPU, which takes 24 of 48; on what resumes it there would be room for 48."""
    out = session(*AUTO, stop_at=2)
    assert "batch.micro auto: 24, on a CPU the largest up to 32 that the batch allows\n" in out
    assert "48 = 24 micro x 2 accumulation" in out
    assert loading.load(tmp_path / "run" / "config.yaml").batch.micro == 24
    monkeypatch.setattr(micro_batch, "_WITH_TRIALS", ("cpu",))
    monkeypatch.setattr(
        micro_batch, "_train", lambda *arguments: pytest.fail("nothing is to be tried")
    )
    out = session(*AUTO)
    assert "batch.micro auto: 24, as the run began\n" in out and "resuming at step 2 of 4\n" in out


def test_a_new_run_trains_with_what_was_tried(session, tmp_path, monkeypatch):
    tried = []
    monkeypatch.setattr(micro_batch, "_WITH_TRIALS", ("cpu",))
    monkeypatch.setattr(micro_batch, "_train", lambda recipe, micro, device: tried.append(micro))
    monkeypatch.setattr(micro_batch, "_memory", lambda device: (1, 1))
    out = session(*AUTO)
    assert tried == [24, 48] and "48 = 48 micro x 1 accumulation" in out
    assert loading.load(tmp_path / "run" / "config.yaml").batch.micro == 48


def test_later_generations_of_an_elastic_run_have_the_micro_batch_of_the_first(tiny):
    """Whoever remembers it; nobody does in the first one."""
    recipe = tiny("batch.micro=auto")

    def known(memories):
        def ask(processes):
            memory = Memory([])
            memory.micro = memories[threads.rank()]
            return memory.with_micro_batch(recipe, processes).batch.micro

        return threads.run(3, 1, ask)

    assert known([None, 8, 8]) == [8, 8, 8]
    assert known([None, None, None]) == [None, None, None]


def sigterm_before(step):
    ranks.before_step(step, functools.partial(signal.raise_signal, signal.SIGTERM))


def measure(slow, until, rank):
    """As if a block took all the time; SIGTERM before a step."""
    from models import costs

    costs.measure = functools.partial(pretended, slow)
    sigterm_before(until)


@pytest.mark.multiprocess
def test_a_run_keeps_its_cut_in_a_topology(tmp_path):
    """Stopped and resumed with another schedule, it is cut anew, and then as before.

    Decisions of a start after which nothing was trained do not count: its recipe may have been
    another one.
    """
    folder = tmp_path / "run"
    two = "parallel.stages=2"
    folder.mkdir()
    (folder / "config.yaml").write_text("left by a start that failed")
    (folder / "decisions.json").write_text("damaged")
    for slow, until, overrides, said in (
        ("stem", 2, (two,), "split [blocks.0.0] (measured): "),
        ("head", 4, (two, "parallel.schedule=1f1b"), "split [head] (measured): "),
        (
            "head",
            0,
            (two,),
            "split [blocks.0.0], as this run has had it with 1 replica of 2 stages",
        ),
    ):
        sabotage = functools.partial(measure, slow, until)
        ended = ranks.train(2, *ranks.SMALL, *overrides, f"run.output={folder}", sabotage=sabotage)
        assert {rank.code for rank in ended} == {75 if until else 0}, ended
        (line,) = (line for line in ended[0].out if line.startswith("split "))
        assert line.startswith(said)
    decisions = json.loads((folder / "decisions.json").read_text())
    taken = [entry["taken"] for entry in decisions if entry["subject"] == "split"]
    assert taken == [["blocks.0.0"], ["head"]]


def on_gpu(times, name, until, cache, rank):
    """A session on a kind of GPU, as far as choices are concerned; SIGTERM before a step."""
    from engines import devices, tuning

    os.environ["XDG_CACHE_HOME"] = cache
    if times is not None:
        pretend(times)
        tuning.check = lambda *arguments: None
        devices.name_of = lambda device: name
    sigterm_before(until)


@pytest.mark.slow  # that a run keeps what it measured is the test above
@pytest.mark.multiprocess
def test_a_run_that_began_on_a_cpu_decides_once_for_each_kind_of_gpu(tmp_path):
    """Whatever is measured later, and though nobody kept what was measured before."""
    other = {**TIMES, PLAIN: 0.001}
    found = []
    sessions = [(None, "cpu"), (TIMES, "one"), (other, "two"), (other, "one")]
    for number, (times, name) in enumerate(sessions, start=1):
        place = functools.partial(on_gpu, times, name, number, str(tmp_path / f"cache {number}"))
        (ended,) = ranks.train(1, f"run.output={tmp_path / 'run'}", sabotage=place)
        assert (ended.code, len(ended.errors)) == (75, 1), ended
        found += [
            line
            for line in ended.out
            if "taken: " in line or line.endswith("as this run has had it")
        ]
    fastest = " ".join(FASTEST)
    plain = " ".join(PLAIN)
    assert found == [
        f"  taken: {fastest}",
        f"  taken: {plain}",
        f"engine auto: {fastest}, as this run has had it",
    ]

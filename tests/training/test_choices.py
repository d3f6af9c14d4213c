"""What is measured is decided once in a run: sessions that would measure other times go on with it."""

import functools
import json
import os
import signal

import pytest

from recipe.errors import CheckpointError
from tests import ranks
from tests.engines.test_exchange import pretended
from tests.engines.test_tuning import FASTEST, PLAIN, TIMES, pretend
from training import choices


def test_what_is_kept_is_found_in_its_place_alone_and_a_damaged_file_is_one_line(tmp_path):
    place = {"device": "cpu", "stages": 2, "recompute": ["head"], "virtual_stages": None}
    assert choices.find(tmp_path, "split", place) is None
    choices.keep(tmp_path, "split", place, ["head"])
    choices.keep(tmp_path, "split", {**place, "stages": 3}, ["stem", "head"])
    assert choices.find(tmp_path, "split", place) == ["head"]
    assert choices.find(tmp_path, "split", {**place, "stages": 3}) == ["stem", "head"]
    assert choices.find(tmp_path, "split", {**place, "device": "gpu"}) is None
    assert choices.find(tmp_path, "engine", place) is None
    for text in ("{", "[3]", '[{"subject": "split"}]', "[" * 200_000):
        (tmp_path / "decisions.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"decisions.json: damaged or not readable; restore it, or delete it"):
            choices.find(tmp_path, "split", {})


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

    Decisions of a start after which nothing was trained do not count: its recipe may have been another one.
    """
    folder, two = tmp_path / "run", "parallel.stages=2"
    folder.mkdir()
    (folder / "config.yaml").write_text("left by a start that failed")
    (folder / "decisions.json").write_text("damaged")
    for slow, until, overrides, said in (
        ("stem", 2, (two,), "split [blocks.0.0] (measured): "),
        ("head", 4, (two, "parallel.schedule=1f1b"), "split [head] (measured): "),
        ("head", 0, (two,), "split [blocks.0.0], as this run has had it with 1 replica of 2 stages"),
    ):
        sabotage = functools.partial(measure, slow, until)
        ended = ranks.train(2, *ranks.SMALL, *overrides, f"run.output={folder}", sabotage=sabotage)
        assert {rank.code for rank in ended} == {75 if until else 0}, ended
        (line,) = (line for line in ended[0].out if line.startswith("split "))
        assert line.startswith(said)
    taken = [entry["taken"] for entry in json.loads((folder / "decisions.json").read_text())]
    assert taken == [["blocks.0.0"], ["head"]]


def on_gpu(times, name, until, cache, rank):
    """A session on a kind of GPU, as far as choices are concerned; SIGTERM before a step."""
    from engines import devices, tuning

    os.environ["XDG_CACHE_HOME"] = cache
    if times is not None:
        pretend(times)
        tuning.check = lambda section, device: None
        devices.name_of = lambda device: name
    sigterm_before(until)


@pytest.mark.slow  # that a run keeps what it measured is the test above
@pytest.mark.multiprocess
def test_a_run_that_began_on_a_cpu_decides_once_for_each_kind_of_gpu(tmp_path):
    """Whatever is measured later, and though nobody kept what was measured before."""
    other, found = {**TIMES, PLAIN: 0.001}, []
    sessions = [(None, "cpu"), (TIMES, "one"), (other, "two"), (other, "one")]
    for number, (times, name) in enumerate(sessions, start=1):
        place = functools.partial(on_gpu, times, name, number, str(tmp_path / f"cache {number}"))
        (ended,) = ranks.train(1, f"run.output={tmp_path / 'run'}", sabotage=place)
        assert (ended.code, len(ended.errors)) == (75, 1), ended
        found += [line for line in ended.out if "taken: " in line or line.endswith("as this run has had it")]
    fastest, plain = " ".join(FASTEST), " ".join(PLAIN)
    assert found == [f"  taken: {fastest}", f"  taken: {plain}", f"engine auto: {fastest}, as this run has had it"]

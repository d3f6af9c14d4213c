"""The doctor on one process and on several: slow ranks and slow images are found; files, codes and
refusals."""

import json
import multiprocessing
import os
import signal
import time

import pytest

from data.transforms import Training
from engines.stage import Stage
from engines.torch_engine import TorchEngine
from parallel.costs import Link
from recipe import loading
from tests import ranks
from tests.conftest import QUICKSTART, TINY
from tests.world import fork_server
from tools import doctor
from tools.diagnosis import examination, loopback, rendering, splitting
from tools.diagnosis.splitting import PARTS
from tools.planning import machine, scaling, workload

SHORT = ("--config", str(QUICKSTART), *TINY, "run.device=cpu", "--json", "--seconds", "0.1")
LAG = 0.05  # seconds that a slow forward pass sleeps; the pass itself takes a few milliseconds
# likewise on one of two ranks, whose exchange can take 0.1 s where other tests have the cores
RANKS_LAG = 0.2
PAUSE = 0.1  # likewise, a slow source for each image
# images: reading them and computing cost little beside LAG and PAUSE
FEW = ("batch.global=4", "batch.micro=2")


def measured_elsewhere(patch=setattr):
    """The machine's peak and the link between two of its processes take seconds, and have tests of
    their own. So have doubts, which a machine that runs other tests gives reason for."""
    patch(splitting, "doubts", lambda times, parts: [])
    patch(TorchEngine, "peak_flops", lambda engine: 1e12)
    patch(loopback, "measure", lambda: [Link(1e-4, 1e-9)] * 3)


@pytest.fixture
def examined(tmp_path, monkeypatch, call):
    """examined(*arguments): exit code, JSON and other lines of stdout, lines of stderr; in an empty
    folder."""
    measured_elsewhere(monkeypatch.setattr)
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code, lines, errors = call(doctor.main, *SHORT, *arguments)
        return code, json.loads(lines.pop()) if code == 0 else None, lines, errors

    return run


@pytest.fixture
def undrawn(monkeypatch):
    """The picture is an empty file: to draw it takes as long as the measurements."""
    monkeypatch.setattr(rendering, "draw", lambda findings, config, path: path.touch())


def test_one_process_is_examined(examined, tmp_path):
    # Whoever has the old files open keeps them: new ones take their names.
    (tmp_path / "doctor").mkdir()
    for name in ("machine.yaml", "step.png"):
        (tmp_path / "doctor" / name).write_text("old")
        os.link(tmp_path / "doctor" / name, tmp_path / f"old {name}")
    code, data, lines, errors = examined("batch.global=12")
    assert (code, errors) == (0, [])
    assert {(tmp_path / f"old {name}").read_text() for name in ("machine.yaml", "step.png")} == {
        "old"
    }
    assert all(len(line) <= 80 and line == line.rstrip() for line in lines)
    assert list(data["parts"]) == list(PARTS)
    assert sum(data["parts"].values()) == pytest.approx(data["step_seconds"])
    # The recipe's step is one micro batch, and so measured as it is.
    assert data["measured"]["seconds"]["as_trained"]["median"] == pytest.approx(
        data["step_seconds"]
    )
    assert data["images_per_second"] == pytest.approx(12 / data["step_seconds"])
    assert [data["parts"][name] for name in ("exchange", "straggling", "bubble", "imbalance")] == [
        0,
        0,
        0,
        0,
    ]
    assert data["images"]["bytes"] is None and data["images"]["per_core"]["median"] > 0
    assert data["methods"] == [] and data["measured"]["seconds"]["without_exchange"] is None
    assert data["advice"]["text"] and [row["rank"] for row in data["ranks"]] == [0]
    assert sorted(path.name for path in (tmp_path / "doctor").iterdir()) == [
        "machine.yaml",
        "step.png",
    ]
    assert (tmp_path / "doctor" / "step.png").read_bytes().startswith(b"\x89PNG")
    # The plan for the machine that was written is what was measured, to the five digits that are
    # written.
    found = machine.load(str(tmp_path / "doctor" / "machine.yaml"))
    assert found.rate.source.startswith(f"measured by tools.doctor on {data['machine']['date']}")
    recipe = loading.load(QUICKSTART, [*TINY, "batch.global=12"])
    single, double = (
        scaling.predict(recipe, found, replicas, workload.of(recipe)) for replicas in (1, 2)
    )
    assert double.images_per_second == pytest.approx(data["next_doubling"]["images_per_second"])
    for part in ("compute", "update"):
        assert single.parts[part] == pytest.approx(data["parts"][part], rel=1e-4)


def test_figures_in_doubt_give_no_advice_no_prediction_and_no_machine(
    examined, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        splitting, "doubts", lambda times, parts: ["the parts add up to 145 % of a step"]
    )
    code, data, lines, _ = examined()
    assert code == 0 and data["doubts"] == ["the parts add up to 145 % of a step"]
    assert data["advice"] is None and data["next_doubling"] is None
    text = " ".join(" ".join(lines).split())
    assert (
        "first No advice, and no machine.yaml is written: the parts add up to 145 % of a step. Something"
        in text
    )
    assert "next not predicted, as the figures are in doubt" in text
    assert [path.name for path in (tmp_path / "doctor").iterdir()] == ["step.png"]


def test_a_longer_step_is_measured_by_few_micro_batches_and_without_a_link_there_is_no_machine(
    examined, undrawn, tmp_path, monkeypatch
):
    monkeypatch.setattr(loopback, "measure", lambda: None)
    code, data, lines, _ = examined("batch.global=960", "batch.micro=12")
    assert code == 0 and data["links"] is None and data["next_doubling"] is None
    assert any("could not be connected" in line for line in lines)
    assert sorted(path.name for path in (tmp_path / "doctor").iterdir()) == ["step.png"]
    assert data["batch"]["accumulation"] == 80 and data["measured"]["accumulation"] in (1, 4)
    factor = 80 / data["measured"]["accumulation"]
    assert data["parts"]["compute"] == pytest.approx(factor * data["measured"]["parts"]["compute"])
    assert data["parts"]["update"] == data["measured"]["parts"]["update"]
    assert any("from steps of" in line for line in lines)


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_slow_images_are_waited_for_and_are_the_advice(examined, undrawn, monkeypatch, workers):
    draw_key = Training.draw_key
    monkeypatch.setattr(
        Training, "draw_key", lambda *arguments: time.sleep(PAUSE) or draw_key(*arguments)
    )
    _, data, _, _ = examined(f"data.workers={workers}", "data.prefetch=1", *FEW)
    assert data["images"]["per_core"]["high"] < 1 / PAUSE
    # 4 images a step, one after the other; a worker reads them while the step computes.
    assert data["parts"]["input"] > (4 * PAUSE if workers == 0 else 0.0)
    assert data["advice"]["limit"] == "input"


def examined_in_ranks(output, *arguments, slow=None):
    """How each of two ranks ended."""
    return ranks.run(2, _examine, arguments, slow, str(output))


def _examine(rank, size, arguments, slow, output):
    from common.command import finish

    measured_elsewhere()
    if rank == slow:
        forward = Stage.forward
        Stage.forward = lambda stage, x: time.sleep(RANKS_LAG) or forward(stage, x)
    finish(
        lambda: doctor.main(
            [*SHORT, "--output", output, *(text.format(rank=rank) for text in arguments)]
        )
    )


@pytest.mark.multiprocess
def test_two_ranks_give_one_report_which_names_the_slow_one(tmp_path):
    ends = examined_in_ranks(tmp_path, slow=1)
    assert [end.code for end in ends] == [0, 0], ends
    assert ends[1].out == []
    data = json.loads(ends[0].out[-1])
    assert [
        line for line in ends[0].out if line != line.rstrip()
    ] == []  # tables of ranks and exchanges are in it
    assert [(row["rank"], row["replica"]) for row in data["ranks"]] == [(0, 0), (1, 1)]
    # The recipe's own keys come first in each form; those with others are only predicted, and so
    # are local steps, and what would take longer than all measurements together, as on a link that
    # other tests make slow.
    first = {
        method["name"]: method for method in reversed(data["methods"]) if method["name"] != "local"
    }
    timed = {
        method["label"]: method["measured"] for method in data["methods"] if method["measured"]
    }
    assert len(first) == 6 and timed
    assert set(timed) == {
        method["label"] for method in first.values() if method["predicted"] < float(SHORT[-1])
    }
    assert all(measured["median"] > 0 for measured in timed.values())
    assert data["links"]["between"] == "replicas" and data["links"]["latency"]["high"] > 0
    assert sum(data["parts"].values()) == pytest.approx(data["step_seconds"])
    assert data["measured"]["seconds"]["without_exchange"]["repetitions"] >= 6
    assert data["next_doubling"]["replicas"] == 4
    assert machine.load(str(tmp_path / "machine.yaml")).name.startswith("2 x ")
    other, slow = data["ranks"]
    assert slow["mean"] > RANKS_LAG and slow["lag"] > 0 > other["lag"]
    # Replicas wait for the mean of the two half as long as one is behind the other, whatever else
    # the machine does.
    behind = (slow["mean"] - other["mean"]) / 2
    assert data["parts"]["straggling"] == pytest.approx(behind, rel=0.5)
    assert data["advice"]["limit"] == "straggling" and "rank 1 on host" in data["advice"]["text"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_pipeline_has_a_bubble(tmp_path):
    ends = examined_in_ranks(tmp_path, "parallel.stages=2")
    assert [end.code for end in ends] == [0, 0], ends
    data = json.loads(ends[0].out[-1])
    # Two micro batches on two stages leave at least a third of the time without work for a stage,
    # even or not.
    assert data["parts"]["bubble"] + data["parts"]["imbalance"] > 0.25 * data["parts"]["compute"]
    assert [(row["stage"], row["lag"]) for row in data["ranks"]] == [(0, None), (1, None)]


@pytest.mark.multiprocess
def test_a_recipe_that_ranks_cannot_share_is_refused_once(tmp_path):
    ends = examined_in_ranks(tmp_path, "run.seed={rank}")
    assert [(end.code, len(end.errors)) for end in ends] == [(2, 1), (2, 0)]
    assert (
        "rank 1 has another recipe than rank 0: run.seed is 0 on rank 0, 1 here; give all hosts"
        in ends[0].errors[0]
    )


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_of_this_host_are_a_link(monkeypatch):
    context = fork_server()  # which has loaded torch, as a new process has not
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    found = loopback.measure()
    assert len(found) == 5
    for link in found:
        assert 0 < link.message(1e6) < 60  # seconds of a megabyte, on whatever busy machine


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run.device=ipu"], "the doctor measures CPUs and GPUs"),
        (["batch.global=25"], "batch.global 25 is not a multiple"),
        (["data.source=folder", "data.root=nowhere"], "nowhere: no such folder"),
        (["--output", "full\nfile/below"], "cannot be written: Not a directory; name another"),
        (["--output", "a run"], "is the folder of a run, as it holds metrics.jsonl"),
        (["--config", "no.yaml"], "no.yaml: No such file"),
        *((["--seconds", text], f"{text!r} is no number from") for text in ("0", "soon", "nan")),
        (
            ["parallel.replicas=2"],
            "needs 2 processes, one was started; start them by torchrun (docs/doctor.md), or",
        ),
    ],
)
def test_wrong_input_is_refused_in_one_line(examined, tmp_path, arguments, message):
    (tmp_path / "full\nfile").write_text("")
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "metrics.jsonl").write_text("kept")
    code, _, _, errors = examined(*arguments)
    assert code == 2 and len(errors) == 1 and message in errors[0]
    assert [path.name for path in (tmp_path / "a run").iterdir()] == ["metrics.jsonl"]


def test_a_signal_ends_it_with_its_own_code(examined, monkeypatch, tmp_path):
    monkeypatch.setattr(
        examination, "examine", lambda *_: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(60)
    )
    code, _, _, errors = examined()
    assert code == 75 and errors == ["stopped; nothing was written"]
    assert not (tmp_path / "doctor").exists()

"""python -m tools.batch RUN --branch: announced, trained by a double of train.py, judged; killed,
it goes on."""

import contextlib
import io
import json
import os
import shutil
import signal
import sys

import pytest

from optim import schedule
from recipe import loading
from recipe.batch import lengths, rate_factor
from tests.conftest import ROOT
from tests.tools.branching import double
from tests.tools.branching.conftest import BATCH, PAUSE, PER_EPOCH, RATE, TOTAL, run_in
from tests.waiting import wait_until
from tests.world import fork_server
from tools import batch
from tools.branching import session
from tools.branching.plan import RULES, Branch
from tools.branching.source import branch_recipe, read

DONE = 0
FAILED = 1
WRONG_INPUT = 2
STOPPED = 75
DOUBLE = (str(ROOT / "tests" / "tools" / "branching" / "double.py"),)
# of 1180 steps: six branches of 36 steps from each of two checkpoints
WHOLE = ("--points", "2", "--share", "0.4")
STEPS = 36
BRANCHES = 12
POINTS = (5 * PER_EPOCH, 15 * PER_EPOCH)
FEW = ("--points", "1", "--share", "0.1")  # four branches
FIRST, SECOND, THIRD = (
    f"step-{10 * PER_EPOCH:08d}-{kind}" for kind in ("order-0", "order-1", "x2-sqrt")
)


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch):
    """The double is a program of its own, which imports ours."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def branched(call):
    """branched(run, *options): exit code, lines of stdout, lines of stderr of the command in this
    process."""

    def command(run, *options):
        command = [run, "--branch", *FEW, *options]
        return call(lambda arguments: batch.main(arguments, trainer=DOUBLE), *command)

    return command


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with all twelve branches, the picture of them, and the lines that the command
    printed."""
    place = tmp_path_factory.mktemp("whole")
    run = run_in(place)
    picture = place / "branches.png"
    out = io.StringIO()
    err = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(
        out
    ), contextlib.redirect_stderr(err):
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setattr(session, "_POLL_SECONDS", 0.01)
        arguments = [str(run), "--branch", *WHOLE, "--json", "--picture", str(picture)]
        assert batch.main(arguments, trainer=DOUBLE) == DONE
    assert err.getvalue() == ""
    return run, picture, out.getvalue().splitlines()


def data(found):
    code, out, err = found
    assert (code, err) == (DONE, [])
    return json.loads(out[-1])


def test_the_cost_is_announced_exactly_and_the_critical_batch_is_that_of_the_task(whole):
    run, picture, out = whole
    found = json.loads(out[-1])
    # Announced before the first branch, and exactly what was trained.
    images = BRANCHES * STEPS * BATCH
    share = images / (TOTAL * BATCH)
    assert (
        out[0]
        == f"branches   12 from 2 checkpoints, of {STEPS * BATCH} images each, with up to 4 x 24 images an update"
    )
    assert out[1].startswith(
        f"cost       {images:,} images, {100 * share:.1f} % of the run's; about 0:00:"
    )
    assert found["cost"]["images"] == images and found["cost"]["share"] == share <= 0.4
    assert found["cost"]["seconds"] == pytest.approx(images / RATE + BRANCHES * PAUSE, rel=1e-6)
    folders = [path for path in (run / "branches").iterdir() if path.is_dir()]
    ends = [json.loads((path / "metrics.jsonl").read_text().splitlines()[-1]) for path in folders]
    begins = [int(path.name.split("-")[1]) for path in folders]
    trained = sum(end["images"] - first * BATCH for end, first in zip(ends, begins))
    assert len(folders) == BRANCHES and trained == images
    # The losses are the double's, and what follows from them.
    assert found["batch"] == BATCH and [point["step"] for point in found["points"]] == list(POINTS)
    for point in found["points"]:
        first = double.loss_of(point["step"], 1, "none", 0, STEPS)
        assert point["loss"] == first and point["spread"] == pytest.approx(0.005)
        assert (point["images"], point["epoch"]) == (
            point["step"] * BATCH,
            point["step"] / PER_EPOCH,
        )
        for rule in RULES:
            for each in point["rules"][rule]["branches"]:
                loss = double.loss_of(point["step"], each["multiple"], rule, 0, STEPS)
                assert (each["loss"], each["batch"]) == (loss, BATCH * each["multiple"])
                assert each["excess"] == pytest.approx(loss / first - 1, abs=1e-12)
                assert each["recovered"] == (each["excess"] <= point["tolerance"])
                assert each["rate"] == point["rate"] * rate_factor(rule, each["multiple"])
    early, late = found["points"]
    assert (early["critical_batch"], early["rules"]["sqrt"]["critical_batch"]) == (4 * BATCH, BATCH)
    assert late["critical_batch"] == late["rules"]["sqrt"]["critical_batch"] == 4 * BATCH
    assert found["critical_batch"] == 4 * BATCH and found["is_bound"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert any("4 x recovered; --share" in line for line in out)


@pytest.mark.parametrize(
    "output", [pytest.param((), marks=pytest.mark.slow), ("--output", "elsewhere/of mine")], ids=str
)
def test_a_picture_may_lie_in_the_folder_that_the_branches_make(
    make_run, branched, tmp_path, monkeypatch, output
):
    """The same command finds its branches there afterwards."""
    monkeypatch.chdir(tmp_path)
    run = make_run()
    picture = (tmp_path / output[1] if output else run / "branches") / "branches.png"
    for _ in range(2):
        assert branched(run, *output, "--picture", picture)[0] == DONE
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_schedule_can_be_pasted_and_has_the_rates_of_the_branches(whole, tmp_path):
    run, _, out = whole
    found = json.loads(out[-1])["schedule"]
    pasted = out[out.index("batch:") : -2]  # without the picture's name and the JSON
    assert len(pasted) == 3 and found["updates"] < TOTAL
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("\n".join([f"extends: {run / 'config.yaml'}", *pasted]) + "\n")
    mine = loading.load(recipe)
    assert mine.batch.schedule == [[float(first), float(size)] for first, size in found["pairs"]]
    assert mine.batch.rate_rule == found["rule"]
    first, size = found["pairs"][-1]
    branch = Branch(first // BATCH, size // BATCH, found["rule"])
    origin = read(run, [])
    plan = session.stored(run / "branches", {"points": 2, "share": 0.4}, origin.recipe)
    own = branch_recipe(origin, plan, branch, tmp_path / "branch")
    length = lengths(own, PER_EPOCH * BATCH)
    rates = schedule.create(own, length), schedule.create(mine, lengths(mine, PER_EPOCH * BATCH))
    assert length.total == branch.step + STEPS
    beginning = [rate(branch.step) * rate_factor(found["rule"], branch.multiple) for rate in rates]
    assert beginning[0] == pytest.approx(beginning[1], rel=1e-12)
    assert [
        rates[0](branch.step + STEPS * part / 4) / rates[0](branch.step) for part in (1, 2, 4)
    ] == pytest.approx([0.75, 0.5, 0.0])


def test_the_recipes_of_branches_differ_in_rates_batches_draws_and_records_alone(make_run):
    keys = (
        "optimizer.momentum=0.8",
        "average.step_decay=0.9",
        "run.resume=never",
        "schedule.warmup_steps=9",
    )
    run = make_run(*keys, "checkpoint.mirror=/elsewhere")
    origin = read(run, [])
    plan = batch.plans.make(
        list(POINTS), points=2, share=0.4, batch=BATCH, per_epoch=PER_EPOCH, total=TOTAL
    )
    changed = {
        "run": {"name", "output", "epochs", "steps", "seed", "resume", "loss_limit"},
        "precision": {"max_skipped_steps"},
        "schedule": {"peak", "power", "final_ratio", "warmup_epochs", "warmup_steps"},
        "batch": {"schedule", "rate_rule"},
        "log": {"every_steps", "noise_scale", "trust_ratios", "tensorboard"},
        "evaluation": {"every_epochs"},
        "checkpoint": {"every_epochs", "mirror"},
    }
    before = origin.recipe.model_dump()
    for branch in plan.branches():
        after = branch_recipe(origin, plan, branch, run / "branches" / branch.name).model_dump()
        for section, keys in after.items():
            different = {key for key, value in keys.items() if value != before[section].get(key)}
            assert different <= changed.get(section, set()), (branch, section, different)
        # The mirror has the run's checkpoints, for which a branch's would be taken.
        assert after["checkpoint"]["mirror"] is None
        assert after["run"]["seed"] == before["run"]["seed"] + branch.order
        pairs = [[0.0, BATCH], [branch.step * BATCH, branch.multiple * BATCH]]
        assert after["batch"]["schedule"] == (pairs if branch.rule else None)


def in_a_process(run, environment, output):
    os.environ.update(environment)
    with open(output, "w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    session._POLL_SECONDS = 0.01
    sys.exit(batch.main([str(run), "--branch", *FEW, "--json"], trainer=DOUBLE))


@pytest.fixture
def started(make_run, tmp_path):
    """started(run, slow): the command as a process of its own, once the branch `slow` has begun."""
    processes = []

    def start(run, slow):
        environment = {"DOUBLE_SLOW": slow, "PYTHONPATH": str(ROOT)}
        arguments = (run, environment, tmp_path / "output")
        processes.append(fork_server().Process(target=in_a_process, args=arguments))
        processes[-1].start()
        wait_until(lambda: (run / "branches" / slow / "starts").exists())
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_killed_or_stopped_it_goes_on_and_gives_the_same_answer_to_the_bit(
    make_run, branched, started, number, tmp_path
):
    undisturbed = data(branched(make_run(name="undisturbed"), "--json"))
    run = make_run()
    process = started(run, THIRD)
    (first,) = (run / "branches" / FIRST / "starts").read_text().splitlines()
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == (-number if number == signal.SIGKILL else STOPPED)
    said = (tmp_path / "output").read_text()
    assert ("SIGTERM: the branches that have ended are kept; the same command goes on" in said) == (
        process.exitcode > 0
    )
    (trained,) = map(int, (run / "branches" / THIRD / "starts").read_text().splitlines())
    wait_until(lambda: not os.path.exists(f"/proc/{trained}"))
    assert data(branched(run, "--json")) == undisturbed
    # The first branch was not trained again, the one that was cut off was.
    assert (run / "branches" / FIRST / "starts").read_text().split() == [first]
    assert len((run / "branches" / THIRD / "starts").read_text().split()) == 2


def test_a_branch_keeps_no_checkpoints_once_it_has_ended(make_run, branched):
    run = make_run()
    assert branched(run)[0] == DONE
    assert list((run / "branches").glob("*/checkpoints")) == []
    # Everything is known: nothing is trained, nor read from the run's checkpoints.
    shutil.rmtree(run / "checkpoints")
    assert branched(run)[0] == DONE


@pytest.mark.parametrize("code", [FAILED, WRONG_INPUT])
def test_a_branch_that_fails_ends_the_command_with_its_last_line(
    make_run, branched, monkeypatch, code
):
    run = make_run()
    monkeypatch.setenv("DOUBLE_FAILS", SECOND)
    monkeypatch.setenv("DOUBLE_CODE", str(code))
    found, out, (error,) = branched(run)
    assert found == code and len(out) == 3 and double.LINE in error
    assert (
        code == WRONG_INPUT
        or f"({run / 'branches' / SECOND}.log); fix this, then rerun the same command" in error
    )
    monkeypatch.delenv("DOUBLE_FAILS")
    assert branched(run)[0] == DONE


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (("--batches", "64"), "--batches goes without --branch"),
        (("--machine", "two_cores"), "--machine goes without --branch"),
        (("--share", "0"), "'0' is no number from"),
        (
            ("--points", "20"),
            "checkpoints: 19 checkpoints before the run's end, but --points is 20; train with",
        ),
        (
            ("--share", "0.01"),
            "checkpoints: a share of 0.01 of the run is 12 steps, but the shortest branches",
        ),
        (
            ("exchange.order=tree",),
            "batch.schedule goes with a dense exchange in fast order without a delay only; use",
        ),
        (
            ("batch.schedule=[[0,24]]",),
            "batch.schedule: its batch grows by itself; branch a run with a constant batch",
        ),
        (("optimizer.momentun=1",), "unknown key; did you mean"),
        (
            ("batch.global=48",),
            "batch.global is 24 there, 48 here: branches begin in the run's own state, to which",
        ),
        (("model.width=0.5",), "model.width is "),
        (
            ("optimizer.momentum=0.5",),
            "optimizer.momentum is 0.9 there, 0.5 here: branches begin in the run's own",
        ),
        (
            ("optimizer.name=sgd",),
            "optimizer.name is lars there, sgd here: branches begin in the run's own state",
        ),
        (
            ("average.step_decay=0.9",),
            "average.step_decay is null there, 0.9 here: branches begin in the run's own",
        ),
        (
            ("data.mixup=0.5",),
            "data.mixup is 0.0 there, 0.5 here: branches begin in the run's own state",
        ),
        (
            ("precision.weights=float32",),
            "precision.weights is float16 there, float32 here: branches begin in",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line_before_anything_is_written(
    untouched, branched, options, fault
):
    code, out, (error,) = branched(untouched, *options)
    assert (code, out) == (WRONG_INPUT, []) and fault in error
    assert not (untouched / "branches").exists()


@pytest.mark.parametrize(
    "option", [("--share", "0.2"), ("--points", "2"), ("--output", "x"), ("run.threads=1",)]
)
def test_options_of_branches_need_branch(untouched, call, option):
    shown = option[0] if option[0].startswith("--") else "section.key=value"
    code, _, (error,) = call(batch.main, untouched, *option)
    assert code == WRONG_INPUT and f"{shown} goes with --branch" in error


def test_a_folder_keeps_its_branches(make_run, branched, tmp_path):
    """Another share, another recipe, other files and a damaged plan are refused; how it is computed
    may change."""
    run = make_run()
    assert branched(run)[0] == DONE
    assert branched(run, "run.threads=1")[0] == DONE
    code, _, (error,) = branched(run, "--share", "0.5")
    assert (
        code == WRONG_INPUT
        and "belongs to other branches: share is 0.1 there, 0.5 here; choose another" in error
    )
    code, _, (error,) = branched(run, "schedule.peak=0.5")
    assert code == WRONG_INPUT and "schedule.peak is 2.0 there, 0.5 here" in error
    (run / "branches" / "plan.json").write_text("[]")
    code, _, (error,) = branched(run)
    assert (
        code == WRONG_INPUT
        and "plan.json: damaged or not readable; choose another folder by --output" in error
    )
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("")
    code, _, (error,) = branched(run, "--output", tmp_path / "notes")
    assert code == WRONG_INPUT and "holds files that are no branches" in error


def test_a_run_without_a_log_is_refused(make_run, branched):
    run = make_run()
    (run / "metrics.jsonl").write_text("")
    code, _, (error,) = branched(run)
    assert code == WRONG_INPUT and "its log has no lines of training yet" in error


def test_the_pace_is_that_of_all_steps_also_where_no_line_tells_of_them(make_run):
    """Stopped 31 steps after a line; and ended early, 30 steps after the last."""
    run = make_run()
    (run / "environment.json").write_text(
        json.dumps({"starts": [{"step": 0}, {"step": PER_EPOCH + 31}]})
    )
    stopped = read(run, [])
    assert (stopped.images_per_second, stopped.pause) == pytest.approx((RATE, PAUSE))
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-2])
    end = {"event": "end", "step": TOTAL + 30, "seconds": last["seconds"] + 30 * BATCH / RATE}
    with open(run / "metrics.jsonl", "a") as stream:
        stream.write(f"{json.dumps(end)}\n")
    ended = read(run, [])
    assert (ended.images_per_second, ended.pause) == pytest.approx((RATE, PAUSE))


def test_branches_start_as_the_run_was_started(make_run):
    """By the launcher with its stages and replicas, whatever the recipe says.

    A start that trained nothing has none.
    """
    origin = read(make_run(repeated=1, replicas=2, stages=3), [])
    command = session._command(origin, origin.folder / "b", DOUBLE)
    assert command[2] == str(ROOT / "tools" / "launch.py")
    assert (
        command[3:7] == ["--stages", "3", "--replicas", "2"]
        and command[-1] == f"run.output={origin.folder / 'b'}"
    )
    single = session._command(origin._replace(replicas=1, stages=1), origin.folder / "b", DOUBLE)
    assert single[2:] == [
        *DOUBLE,
        "--config",
        str(origin.folder / "b" / "config.yaml"),
        command[-1],
    ]

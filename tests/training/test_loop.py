"""The loop: what happens when, what is written, and how it stops.

Mostly on an engine that follows a script.
"""

import contextlib
import re
import signal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import DataError
from data.sources import open_source
from engines import factory
from optim import norms
from recipe import batch as arithmetic
from tests.training.conftest import SIX_STEPS_AN_EPOCH
from tests.training.scripted import EMPTY, ScriptedEngine
from training import stopping
from training.checkpoint import CheckpointFolder
from training.loop import Stopped, Trainer, TrainingError
from training.progression import Progression
from training.weights import best_of


def test_steps_come_in_order_with_the_rate_of_the_schedule_and_log_evaluation_checkpoint_behind(
    start,
):
    """Linear over two steps from 0 to the peak of 3, then (1 - t)**2 down to 1e-5 of it over the
    other ten."""
    engine = ScriptedEngine()
    events = start(engine)
    assert engine.steps == list(range(12))
    final = 3e-5
    decay = [final + (3 - final) * (1 - t / 10) ** 2 for t in range(10)]
    assert engine.rates == pytest.approx([0.0, 1.5, *decay], rel=1e-12)
    assert [(event["event"], event["step"]) for event in events] == [
        ("train", 4),
        ("eval", 6),
        ("checkpoint", 6),
        ("train", 8),
        ("train", 12),
        ("eval", 12),
        ("checkpoint", 12),
        ("end", 12),
    ]
    assert [event["file"][-5:] for event in start.events("checkpoint")] == ["06.pt", "12.pt"]


@pytest.mark.parametrize("rule", ["none", "sqrt", "linear"])
def test_the_rate_follows_a_batch_that_grows_by_its_rule(start, rule):
    """That of the images seen, as above, for an update of one step; then updates of two steps, and
    of three."""
    engine = ScriptedEngine()
    schedule = "batch.schedule=[[0, 24], [72, 48], [168, 72]]"
    events = start(engine, schedule, f"batch.rate_rule={rule}", "log.every_steps=1")
    # 6 and 12 are ends of epochs
    updates = [(0, 1), (1, 1), (2, 1), (3, 2), (5, 1), (6, 1), (7, 3), (10, 2)]
    assert engine.steps == [step for step, _ in updates]
    final = 3e-5
    rates = [0.0, 1.5, *(final + (3 - final) * (1 - t / 10) ** 2 for t in range(10))]
    factor = {
        "none": lambda steps: 1,
        "sqrt": lambda steps: steps**0.5,
        "linear": lambda steps: steps,
    }[rule]
    assert engine.rates == pytest.approx(
        [rates[step] * factor(steps) for step, steps in updates], rel=1e-12
    )
    assert [event["lr"] for event in events if event["event"] == "train"] == engine.rates


@pytest.mark.parametrize("stopped", [None, 0, 1, 2, 3, 5, 6, 7])
def test_a_line_has_the_number_of_updates_of_a_batch_that_grows(start, stopped):
    """Updates of 1, 1, 1, 2 and 1 steps, then, in an epoch of its own, 1, 3 and 2.

    Stopped after that of a step.
    """
    keys = ("batch.schedule=[[0, 24], [72, 48], [168, 72]]", "checkpoint.every_epochs=9")
    progression = Progression()
    if stopped is not None:
        with pytest.raises(Stopped):
            start(ScriptedEngine(before=raising(signal.SIGTERM, stopped)), *keys)
        progression = Progression(**start.content()["progression"])
    begin = progression.step
    start(ScriptedEngine(), *keys, progression=progression)
    lines = [(event["step"], event["batch"], event["updates"]) for event in start.events("train")]
    whole = [(5, 48, 4), (10, 72, 3), (12, 48, 1)]
    assert lines == [line for line in whole if line[0] > begin]


def test_a_line_of_a_batch_that_stays_has_no_number_of_updates(start):
    """Which is that of its steps."""
    assert not any("updates" in event or "batch" in event for event in start(ScriptedEngine()))


@pytest.mark.parametrize(
    ("overrides", "logged", "evaluated", "saved"),
    [
        (
            ("evaluation.every_epochs=0.5", "checkpoint.every_epochs=0.34"),
            [4, 8, 12],
            [3, 6, 9, 12],
            range(2, 13, 2),
        ),
        (
            ("evaluation.every_epochs=9", "checkpoint.every_epochs=0.001"),
            [4, 8, 12],
            [12],
            range(1, 13),
        ),
        (("run.steps=7", "log.every_steps=5"), [5, 7], [6, 7], [6, 7]),
    ],
)
def test_the_last_step_is_always_logged_evaluated_and_saved(
    start, overrides, logged, evaluated, saved
):
    """The others at multiples of their interval, rounded to whole steps of at least one."""
    engine = ScriptedEngine()
    start(engine, *overrides)
    assert start.steps("train") == logged
    assert [step + 1 for step in engine.measured] == logged
    assert start.steps("eval") == engine.evaluated_after == evaluated
    assert start.steps("checkpoint") == list(saved)
    # an epoch's rest is no epoch
    assert engine.epoch_ends == [step for step in (6, 12) if step <= logged[-1]]


def test_a_log_line_averages_the_steps_since_the_last_one(start):
    """Steps 4 to 7 have losses and hits of 4, 5, 6 and 7 out of 24 images each; norms and trust
    ratios (to six digits) are the last step's."""
    start(ScriptedEngine())
    event = start.events("train")[1]
    assert event["loss"] == 5.5
    assert event["top1"] == pytest.approx(22 / 96)
    assert event["epoch"] == pytest.approx(8 / 6)
    assert (event["gradient_norm"], event["weight_norm"], event["update_norm"]) == (
        70.0,
        71.0,
        72.0,
    )
    assert event["trust"] == {"stem": 2.33333}
    assert (event["skipped_steps"], event["unreadable_images"], event["loss_scale"]) == (
        0,
        0,
        128.0,
    )
    assert "trust" not in start(ScriptedEngine(), "log.trust_ratios=false")[0]


def test_averages_are_scored_beside_the_weights_once_there_are_some(start):
    """Evaluations at steps 3, 6, 9, 12 of epochs of 6: 3, 6, 9 and 2 hits of 10, and one more per
    epoch averaged."""
    engine = ScriptedEngine(averaging=True)
    count = engine.evaluate_step
    engine.evaluate_step = lambda batch: count(batch)._replace(
        top1=count(batch).top1 - 10 * (len(engine.steps) == 12)
    )
    lines = []
    *_, end = start(engine, "evaluation.every_epochs=0.5", "run.steps=12", say=lines.append)
    scores = [
        (event["top1"], event.get("epoch_average", {}).get("top1"))
        for event in start.events("eval")
    ]
    assert scores == [(0.3, None), (0.6, 0.7), (0.9, 1.0), (0.2, 0.4)]
    assert (
        end["epoch_average"] == {"top1": 0.4, "top5": 0.9, "loss": 0.5}
        and "step_average" not in end
    )
    assert (end["top1"], end["best_top1"], end["top5"], end["images"]) == (0.2, 0.9, 0.9, 12 * 24)
    assert "best top1 100.00% (epoch average)  " in lines[-1], (
        "what --best chooses from, not the trained weights alone"
    )
    assert end["images_per_second"] == pytest.approx(end["images"] / end["seconds"])
    assert start.saved() == [6, 9, 12], (
        "an evaluation that is the best so far saves its weights, too"
    )
    assert start.steps("checkpoint") == [6, 12] and start.content()["classes"] == ["cat", "dog"]


@pytest.mark.parametrize("keep_best", [True, False])
def test_the_best_weights_are_kept_where_no_checkpoint_is_due(start, tmp_path, keep_best):
    """Hits at steps 2, 4 ... are 3, 5, 5, 4, 9, 8; a checkpoint is due at the last step alone.

    Resumed once.
    """
    hits = {2: 3, 4: 5, 6: 5, 8: 4, 10: 9, 12: 8}
    rare = (
        "evaluation.every_epochs=0.34",
        "checkpoint.every_epochs=9",
        f"checkpoint.keep_best={keep_best}".lower(),
    )

    def scored(**about):
        engine = ScriptedEngine(**about)
        count = engine.evaluate_step
        engine.evaluate_step = lambda batch: count(batch)._replace(
            top1=torch.tensor(hits[len(engine.steps)])
        )
        return engine

    with pytest.raises(Stopped):
        start(scored(before=raising(signal.SIGTERM, 6)), *rare)
    assert start.saved() == ([4, 7] if keep_best else [7])
    content = start.content()
    engine = scored()
    engine.load_state_dict(content["engine"])
    lines = []
    events = start(
        engine, *rare, progression=Progression(**content["progression"]), say=lines.append
    )
    assert start.saved() == ([7, 10, 12] if keep_best else [7, 12])
    assert "best top1 90.00%" in lines[-1]
    best = CheckpointFolder(tmp_path / "checkpoints", 2, True).load_best(pytest.fail)
    assert best["progression"]["step"] == (10 if keep_best else 12)
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [12]


def test_the_last_line_names_the_trained_weights_where_no_average_is_better(start):
    lines = []
    start(ScriptedEngine(), "run.steps=12", say=lines.append)
    assert re.search(r"best top1 [\d.]+% \(trained weights\)", lines[-1])


@pytest.mark.parametrize(("hits", "whose"), [(6, "trained weights"), (5, "step average")])
def test_the_last_line_names_the_weights_that_best_takes(start, tmp_path, hits, whose):
    """6 hits of the average after an epoch, `hits` of the trained weights after the next: of equal
    scores the newest."""
    engine = ScriptedEngine()
    count = engine.evaluate_step
    scored = {
        ("trained", 6): 3,
        ("step_average", 6): 6,
        ("trained", 12): hits,
        ("step_average", 12): 4,
    }
    chosen = []

    @contextlib.contextmanager
    def using(name):
        chosen.append(name)
        yield
        chosen.pop()

    def evaluate_step(batch):
        top1 = torch.tensor(scored[chosen[-1], len(engine.steps)])
        return count(batch)._replace(top1=top1)

    engine.averages = lambda: ("step_average",)
    engine.using = using
    engine.evaluate_step = evaluate_step
    lines = []
    start(engine, "run.steps=12", say=lines.append)
    assert f"best top1 60.00% ({whose})" in lines[-1]
    best = CheckpointFolder(tmp_path / "checkpoints", 2, True).load_best(pytest.fail)["progression"]
    assert best_of(best["scores"]).replace("_", " ").replace("trained", "trained weights") == whose


def test_the_utilisation_counts_what_each_epoch_costs(start, monkeypatch):
    """Images of epoch 1 cost three times those of epoch 0; the log line at step 8 covers two steps
    of each."""
    monkeypatch.setattr(ScriptedEngine, "peak_flops", lambda engine: 1e6)
    start(ScriptedEngine(), flops_per_image=lambda epoch: (1.0, 3.0)[epoch])
    shares = [event["mfu"] * 1e6 / event["images_per_second"] for event in start.events("train")]
    assert shares == pytest.approx([1.0, 2.0, 3.0], rel=1e-12)


def test_left_out_images_are_named_and_counted_and_the_loss_is_that_of_the_others(start):
    """An engine's loss is a mean over the whole batch, in which images that were left out stand as
    0: half of 24."""
    lines = []
    whole = start(ScriptedEngine())[0]
    (half, *_) = start(
        ScriptedEngine(images=12, unreadable=("a.jpg: empty", "b.jpg: empty")), say=lines.append
    )
    assert [event["unreadable_images"] for event in start.events("train")] == [8, 16, 24]
    named = [line for line in lines if line.startswith("left out: ")]
    assert named == ["left out: a.jpg: empty", "left out: b.jpg: empty"] * 12
    assert (half["loss"], half["top1"]) == (2 * whole["loss"], 2 * whole["top1"])


def test_a_run_that_cannot_read_anything_any_more_stops_and_says_so(start):
    """It would go on, with a loss of 0, to the end."""
    with pytest.raises(
        DataError,
        match=r"^step 4: no image of the last 4 steps can be read; the last: a.tar: gone; ",
    ):
        start(ScriptedEngine(images=0, unreadable=("a.tar: gone",)))
    assert start.steps("train", "end") == []


@pytest.mark.parametrize(
    ("names", "where", "dynamic", "remedy"),
    [
        ([], "out;", "false", "precision.loss_scale or"),
        (["a"], r"\(a\);", "false", "precision.loss_scale or"),
        (
            [*"abc"],
            r"\(that of c and of 2 parameters before it\);",
            "true",
            "128, so start a new run with a lower",
        ),
    ],
)
def test_too_many_skipped_steps_in_a_row_end_the_run_with_a_remedy(
    start, names, where, dynamic, remedy
):
    """From step 3 (the fourth) on: five in a row at step 8, where the limit is three.

    Nothing is saved any more.
    """
    engine = ScriptedEngine(finite=lambda step: step < 3)
    engine.not_finite = lambda: names
    with pytest.raises(
        TrainingError, match=rf"^step 8: .*5 updates .*{where} .* step 3; .*{remedy} schedule.peak"
    ):
        start(engine, "precision.max_skipped_steps=3", f"precision.dynamic_loss_scale={dynamic}")
    assert len(engine.steps) == 8 and start.saved() == [6]
    start(
        ScriptedEngine(finite=lambda step: step not in (1, 2, 3)), "precision.max_skipped_steps=3"
    )
    # all in a row at the first line
    assert [event["skipped_steps"] for event in start.events("train")] == [3, 3, 3]


def test_the_terminal_says_how_many_updates_were_skipped_and_where_most_were(start):
    """Of a run without any, nothing.

    Steps 1 to 3 are skipped, or all but the first four; lines are at 4, 8 and 12.
    """
    for finite, counts, most in (
        (lambda step: True, [None] * 4, False),
        (lambda step: step not in (1, 2, 3), ["3 of 4", "3 of 8", "3 of 12", "3 of 12"], False),
        (lambda step: step < 4, [None, "4 of 8", "8 of 12", "8 of 12"], True),
    ):
        said = []
        start(ScriptedEngine(finite=finite), "precision.max_skipped_steps=99", say=said.append)
        lines = [line for line in said if line.startswith(("step ", "done: "))]
        for line, count in zip(lines, counts):
            assert (f" {count} updates skipped" in line) if count else ("skipped" not in line)
        assert len(lines) == 4
        assert ("\nmost updates were skipped: " in lines[-1]) == most


def test_skipped_updates_of_several_steps_are_counted_as_updates(start):
    """Six of two steps each: the last two of the first four, and four of all."""
    two = "batch.schedule=[[0, 48]]"
    with pytest.raises(
        TrainingError, match=r"^step 8: the last 2 updates had .* the weights are those of step 4; "
    ):
        start(ScriptedEngine(finite=lambda step: step < 4), two, "precision.max_skipped_steps=1")
    for skipped, most in ((3, False), (4, True)):
        said = []
        engine = ScriptedEngine(finite=lambda step, few=skipped: step >= 2 * few)
        start(engine, two, "precision.max_skipped_steps=99", say=said.append)
        assert len(engine.steps) == 6 and f"{skipped} updates skipped" in said[-1]
        assert ("\nmost updates were skipped: " in said[-1]) == most


def test_the_last_line_has_the_skipped_updates_of_earlier_sessions_too(start):
    """A checkpoint carries the count, for a run that was stopped between its last step and its last
    line."""
    said = []
    start(
        ScriptedEngine(),
        progression=Progression(step=12, skipped=7, scores={"top1": 0.5, "top5": 0.9}),
        say=said.append,
    )
    assert "7 of 12 updates skipped" in said[-1]


# times ln 10: 3.45; lines have 0.5, 2.5, 4.5, 6.5, 8.5, 10.5
LOW_LIMIT = ("log.every_steps=2", "run.loss_limit=1.5")


def test_a_loss_beyond_reason_in_three_lines_ends_the_run(start):
    with pytest.raises(
        TrainingError, match=r"^step 10: the training loss is 8.5, and was above 3.45 \(1.5 times "
    ):
        start(ScriptedEngine(), *LOW_LIMIT)
    assert (start.steps("train"), start.saved()) == ([2, 4, 6, 8, 10], [6])
    progression = Progression(**start.content()["progression"])
    assert progression.lines_above_limit == 1
    with pytest.raises(TrainingError, match=r"^step 10: "):  # resumed: where it would have ended
        start(ScriptedEngine(), *LOW_LIMIT, progression=progression)


def test_a_line_below_the_limit_starts_the_count_anew_and_a_signal_in_the_last_step_lets_the_run_end(
    start,
):
    """Steps 8 and 9 have no loss to speak of."""
    calm = ScriptedEngine(
        before=raising(signal.SIGTERM, 11), loss=lambda step: 0 if step in (8, 9) else step
    )
    start(calm, *LOW_LIMIT)
    assert start.steps("end") == [12]


def raising(number, *at):
    """Sends this process a signal before each of the steps named."""
    return lambda step: [signal.raise_signal(number) for _ in range(at.count(step))]


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.mark.parametrize(("number", "step"), [*zip(SIGNALS, (0, 3, 5)), (signal.SIGTERM, 10)])
def test_a_signal_stops_after_the_step_and_saves_it(start, number, step):
    """Within a log window, at its end, at a scheduled checkpoint: never is there an event of the
    stop itself."""
    engine = ScriptedEngine(before=raising(number, step))
    lines = []
    with pytest.raises(
        Stopped, match=rf"^{number.name}: saved at step {step + 1}; the same command resumes$"
    ):
        start(engine, say=lines.append)
    assert f"{number.name}: finishing this step, then saving" in lines
    assert start.saved()[-1] == step + 1
    progression = start.content()["progression"]
    assert progression["step"] == len(engine.steps) == step + 1
    since_log = [n for n in range(step + 1) if n >= (step + 1) // 4 * 4]
    assert (progression["loss"], progression["steps_in_window"]) == (
        float(sum(since_log)),
        len(since_log),
    )
    assert (progression["correct"], progression["images"]) == (sum(since_log), 24 * len(since_log))
    assert progression["logged_checkpoint"] == (step == 5)
    assert start.steps("checkpoint") == [n for n in (6,) if n <= step + 1]


def test_a_signal_of_the_launcher_before_the_loop_is_kept_and_not_named(monkeypatch):
    monkeypatch.setenv("POD_LAUNCHER", "1")
    monkeypatch.setattr(stopping, "_noted", None)
    found = []

    def lost(*_):
        found.append("lost")

    handlers = {number: signal.signal(number, lost) for number in (signal.SIGINT, signal.SIGUSR1)}
    try:
        stopping.listen_early()
        for number in handlers:  # Ctrl-C is for the launcher
            signal.raise_signal(number)
        with stopping.StopSignals(lambda number, _: found.append(stopping.name_of(number))):
            pass
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert found == ["stopping"]


def test_a_termination_just_before_the_loop_is_kept_and_one_after_it_changes_nothing():
    found = []
    lost = []
    old = signal.signal(signal.SIGTERM, lambda *_: lost.append("lost"))

    def note(number, frame):
        found.append(number)

    try:
        with stopping.late_signals():
            signal.raise_signal(signal.SIGTERM)
            with stopping.StopSignals(note):
                pass
            signal.raise_signal(signal.SIGTERM)
        with stopping.StopSignals(note):
            pass
        assert (found, lost) == ([signal.SIGTERM], [])
        signal.raise_signal(signal.SIGTERM)
        assert lost == ["lost"]
    finally:
        signal.signal(signal.SIGTERM, old)


def test_a_termination_while_torch_loads_is_kept_for_the_loop(monkeypatch):
    """Unheard it ends the process, or is lost where the process is the first one of a container."""
    monkeypatch.setattr(stopping, "_noted", None)
    found = []

    def lost(*_):
        found.append("lost")

    handlers = {number: signal.signal(number, lost) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        stopping.withhold()  # as the launcher does before it becomes train.py
        signal.raise_signal(signal.SIGTERM)
        before = stopping.listen_early()
        assert stopping.was_asked()
        with stopping.StopSignals(lambda number, _: found.append(stopping.name_of(number))):
            pass
        stopping.put_back(before)
        assert [signal.getsignal(number) for number in handlers] == [lost, lost]
    finally:
        stopping.put_back(handlers)
    assert found == ["SIGTERM"]


def test_a_termination_that_comes_twice_while_printing_still_saves_and_handlers_are_put_back(start):
    """`timeout` and schedulers signal the process and its group.

    Streams refuse reentrant writing.
    """

    def say(line):
        if line.startswith("SIGTERM"):
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(Stopped, match="SIGTERM: saved at step 2"):
        start(ScriptedEngine(before=raising(signal.SIGTERM, 1, 1)), say=say)
    assert start.saved() == [2]
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize(
    ("waited", "shares", "workers"),
    [
        (lambda steps: min(steps, 4) / 2 + max(steps - 8, 0), [0.5, 0.0, 1.0], 6),
        (lambda steps: 0.09 * steps, [0.09] * 3, None),
    ],
)
def test_log_lines_have_the_share_of_waiting_and_a_run_is_input_bound_above_a_tenth(
    start, monkeypatch, waited, shares, workers
):
    """Each step takes a second; of the first case half of the first four is waiting, then none,
    then all."""
    engine = ScriptedEngine(waited=waited)
    lines = []
    monkeypatch.setattr("training.monitor.time.monotonic", lambda: 1000 + len(engine.steps))
    *_, end = start(engine, "data.workers=3", say=lines.append)
    assert [event["data_wait"] for event in start.events("train")] == pytest.approx(shares)
    shown = [line.partition(" wait ")[2].split()[0] for line in lines if line.startswith("step ")]
    assert shown == [f"{share:.0%}" for share in shares]
    assert end["data_wait"] == pytest.approx(sum(shares) / 3)
    assert (end["input_bound"], end["workers_needed"]) == (workers is not None, workers)
    assert ("data.workers=6 would keep up" in lines[-1]) == end["input_bound"]


def test_waits_before_a_stop_count_although_no_line_has_reported_them(start, monkeypatch):
    """Each step takes a second, a quarter of it waiting; stopped after six steps, two behind a log
    line."""

    def stop(step):
        if step == 5:
            signal.raise_signal(signal.SIGTERM)

    engine = ScriptedEngine(before=stop, waited=lambda steps: steps / 4)
    monkeypatch.setattr("training.monitor.time.monotonic", lambda: 1000 + len(engine.steps))
    with pytest.raises(Stopped):
        start(engine)
    content = start.content()
    assert (content["progression"]["step"], content["progression"]["waited"]) == (6, 1.5)
    engine = ScriptedEngine(waited=lambda steps: (steps - 6) / 4)
    engine.load_state_dict(content["engine"])
    *_, end = start(engine, progression=Progression(**content["progression"]))
    assert end["data_wait"] == pytest.approx(0.25)
    assert [event["data_wait"] for event in start.events("train")] == pytest.approx(
        [0.25] * len(start.events("train"))
    )


class Waits(TorchDispatchMode):
    """Notes each operation by which the host asks for a value: item(), bool(), int(), a mask as an
    index."""

    ASKING = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select")
    seen = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function._schema.name.partition("::")[2]
        self.seen += [name] * (name in self.ASKING)
        return function(*arguments, **(keywords or {}))


def test_the_host_waits_for_the_device_on_log_steps_only(start, tiny, monkeypatch):
    """With the real engine.

    On the CPU nothing ever waits, but the operations that would are the same ones.

    Float32 weights, as the CPU's stochastic rounding may ask whether to round; nor does the update
    ask whether to step, as on other devices.
    """
    overrides = (
        "run.steps=6",
        "log.every_steps=2",
        "data.mixup=0.2",
        "data.cutmix=0.85",
        "average.step_decay=0.9",
        "average.epoch_decay=0.9",
        "precision.weights=float32",
        "precision.compute=bfloat16",
        "precision.dynamic_loss_scale=true",
        "schedule.peak=0.1",
    )
    recipe = tiny(*SIX_STEPS_AN_EPOCH, *overrides)
    engine = factory.create(recipe, arithmetic.divide(recipe), steps_per_epoch=6)
    engine.weights._update.host_may_read = False
    monkeypatch.setattr(norms, "host_may_read", lambda device: False)
    waits = Waits()
    by_step = {}
    step = Trainer._step
    for method in ("tolist", "numpy", "cpu", "__array__"):  # these read without an operation
        real = getattr(torch.Tensor, method)

        def noted(*arguments, method=method, real=real, **keywords):
            waits.seen.append(method)
            return real(*arguments, **keywords)

        monkeypatch.setattr(torch.Tensor, method, noted)

    def counted(trainer, micro_batches, update):
        waits.seen.clear()
        step(trainer, micro_batches, update)
        by_step[update.end] = list(waits.seen)

    monkeypatch.setattr(Trainer, "_step", counted)
    monkeypatch.setattr(engine, "peak_flops", lambda: 1e12)
    evaluation = [EMPTY._replace(images=torch.zeros(1, 3, 16, 16, dtype=torch.uint8))]
    # the host's own
    loaded = list(engine.training_batches(open_source(recipe.data, 10, "train"), range(6)))
    with waits:
        start(engine, *overrides, batches=loaded, evaluation=evaluation, steps_per_epoch=6)
    assert [number for number, seen in by_step.items() if seen] == [2, 4, 6]
    assert "_local_scalar_dense" in by_step[2] and "tolist" in by_step[2]

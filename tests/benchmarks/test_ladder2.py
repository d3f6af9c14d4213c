"""The second ladder: its trials, its figures, and its verdict."""

import math

import pytest

from benchmarks.evidence import ladder2, tuning
from benchmarks.evidence.ladder2 import (
    EPOCHS_EQUAL,
    GROWING,
    LARS,
    LOCAL,
    NESTEROV,
    RULES,
    SMALLEST,
    Ladder2,
    Trials,
)
from benchmarks.evidence.runs import Outcome
from recipe import loading
from tests.conftest import QUICKSTART
from tools.planning import batches


def rate_of(run):
    return float(
        next(text for text in run.overrides if text.startswith("schedule.peak=")).partition("=")[2]
    )


@pytest.mark.parametrize(
    ("best", "fourth"), [(0.06, 0.0577), (0.13, 0.173), (1.0, 0.9), (0.01, 0.0111)]
)
def test_four_rates_are_tried_for_everyone(monkeypatch, best, fourth):
    """Around 0.1: 0.0333, 0.1, 0.3, and one beside the best of them."""
    done = {}
    monkeypatch.setattr(tuning, "outcome", done.get)
    trials = Trials(NESTEROV, SMALLEST)
    assert trials.rates() == [0.0333, 0.1, 0.3] and trials.best() is None
    while set(trials.runs()) - set(done):
        done.update(
            (run, Outcome(0.5, abs(math.log(rate_of(run) / best)) + run.seed / 100, 1.0))
            for run in trials.runs()
        )
    assert trials.rates() == [0.0333, 0.1, 0.3, fourth]
    assert len(done) == 4 * 2
    assert trials.best() == min(trials.rates(), key=lambda rate: abs(math.log(rate / best)))


def test_a_rate_that_diverges_with_one_seed_is_no_better_than_its_mean_with_guessing(monkeypatch):
    lost = Outcome(0.02, math.inf, math.inf, "step 3")
    monkeypatch.setattr(tuning, "outcome", lambda run: lost if run.seed else Outcome(0.9, 0.5, 1.0))
    assert Trials(NESTEROV, SMALLEST).loss(0.1) == pytest.approx((0.5 + math.log(50)) / 2)


@pytest.fixture
def tuned(monkeypatch):
    monkeypatch.setattr(Trials, "best", lambda trials: {96: 0.1, 384: 0.4, 1536: 1.6}[trials.batch])
    return {
        (row.labels["kind"], row.labels["optimizer"], row.labels["batch"]): row
        for row in Ladder2().series()
    }


def test_rates_between_are_geometric_means_and_lengths_are_as_declared(tuned):
    equal = [tuned[EPOCHS_EQUAL, NESTEROV, batch] for batch in ladder2.BATCHES]
    assert [each.labels["peak"] for each in equal] == [0.1, 0.2, 0.4, 0.8, 1.6]
    assert [ladder2.updates_of(each.runs[0]) for each in equal] == [9600, 4800, 2400, 1200, 600]
    assert {
        ladder2.updates_of(tuned["equal updates", LARS, batch].runs[0])
        for batch in ladder2.BATCHES[:-1]
    } == {600}
    growing = ladder2.updates_of(tuned[GROWING, LARS, SMALLEST].runs[0])
    assert growing == 3840 + 1920 // 2 + 1920 // 4 + 1920 // 8 < 0.6 * 9600
    series = tuned[LOCAL, LARS, SMALLEST]  # exchanges as often as the largest batch
    recipe = series.runs[0].recipe()
    assert recipe.batch.global_ // series.replicas == SMALLEST
    assert recipe.batch.global_ * recipe.exchange.local_steps == ladder2.BATCHES[-1]


@pytest.mark.parametrize(
    ("epoch", "updates"), [(1, 640), (6, 3840), (7.5, 4320), (9.3, 4848), (15, 5520)]
)
def test_updates_to_the_target_are_those_of_a_batch_that_grows(tuned, monkeypatch, epoch, updates):
    """640 an epoch at first, then half, a quarter and an eighth as many: from epochs 6, 9 and 12
    on."""
    monkeypatch.setattr("benchmarks.evidence.ladder2.curve", lambda *_: ([epoch], [ladder2.TARGET]))
    assert ladder2.to_target(tuned[GROWING, LARS, SMALLEST].runs[0]) == pytest.approx(updates)


def rows_of(lost):
    found = [
        {"kind": EPOCHS_EQUAL, "optimizer": name, "batch": batch, "lost": None if batch == SMALLEST else points,
         "top1_mean": 95 - points}
        for name, falls in lost.items() for batch, points in zip(ladder2.BATCHES, falls)
    ]  # fmt: skip
    beside = [(kind, name) for kind in (GROWING, LOCAL) for name in (NESTEROV, LARS)]
    return found + [
        {"kind": kind, "optimizer": name, "batch": SMALLEST, "lost": 0.7} for kind, name in beside
    ]


def test_the_verdict_is_the_largest_batch_before_the_first_that_loses():
    rows = rows_of(dict.fromkeys(RULES, (0, 0.5, 1.2, 0.5, 3)) | {LARS: (0, -0.2, 0.3, 0.9, 1.0)})
    assert ladder2.largest_without_loss(rows, NESTEROV) == 192
    assert ladder2.largest_without_loss(rows, LARS) == 1536
    verdict = Ladder2().verdict(rows)
    assert (
        f"{LARS} 1536" in verdict
        and f"{NESTEROV} 192" in verdict
        and f"Best at 1536: {LARS}" in verdict
    )
    assert "growing batch of LARS gradient 0.7" in verdict


def test_losses_have_students_interval(tuned, monkeypatch):
    """Seeds that end with 90, 91 and 92 and with 88, 89 and 90: 2 points lost, 2.776 x sqrt((1 + 1)
    / 3) around."""
    monkeypatch.setattr("benchmarks.evidence.ladder2.curve", lambda *_: ([1.0, 2.0], [0.6, 1.0]))

    def outcome(run):
        large = "batch.global=192" in run.overrides
        return Outcome((88 if large else 90) / 100 + (run.seed - 2) / 100, 0.4, 1.0)

    monkeypatch.setattr("benchmarks.evidence.experiment.outcome", outcome)
    monkeypatch.setattr(
        Ladder2, "series", lambda self: [tuned[EPOCHS_EQUAL, LARS, batch] for batch in (96, 192)]
    )
    one, two = Ladder2().rows()
    assert one["lost"] is None and two["lost"] == pytest.approx(2)
    assert two["interval"] == pytest.approx(2.776 * (2 / 3) ** 0.5, abs=1e-3)
    assert one["to_target"] == 1.75 * 640 and two["to_target"] == 1.75 * 320


def test_noise_scales_are_taken_up_to_the_target():
    """A log line each 100 updates; the target is reached after 250."""
    log = [
        {"step": step, "epoch": 1.0, "noise_scale": {"images": step, "error": 1.0}}
        for step in (100, 200, 300, 400)
    ]
    recipe = loading.load(QUICKSTART, ["batch.global=96"])
    found = [(each.noise, each.updates) for each in ladder2.until_target(log, 250.0, recipe)]
    assert found == [(100, 100), (200, 100), (300, 50), (400, 0)]


def test_updates_of_the_warm_up_do_less_than_those_at_the_peak():
    """240 updates at the smallest batch, all in a warm-up of 240, do as much as 160 at the peak.

    With a noise scale of as many images as the batch, four times the batch needs 5/8 of them: 100.
    Its own warm-up of 60 does 40; so 120.
    """
    until = [batches.Interval(0.1, 10.0, SMALLEST, SMALLEST, 0.0)] * 24

    def warm(step):
        return min(1.0, step / 240)

    assert ladder2.predicted(until, warm, SMALLEST) == pytest.approx(240, rel=2e-3)
    assert ladder2.predicted(until, warm, 4 * SMALLEST) == pytest.approx(120, rel=2e-3)
    assert ladder2.predicted(until, lambda step: 1.0, 4 * SMALLEST) == pytest.approx(150)
    assert ladder2.predicted(until, lambda step: float(step < 100), 4 * SMALLEST) == math.inf

"""Updates to a target, and their prediction from the smallest batch, on runs whose answer is known."""

import pytest

from benchmarks.evidence import predicted_updates as predicted

PER_EPOCH = {batch: 46080 // batch for batch in predicted.UPDATES}
NOISE, FEWEST = 480.0, 200.0  # images; updates that the largest batch of all would take


def needed(batch, rate):
    """By the published curve at the best rate, twice as many at others; never at the largest."""
    updates = FEWEST * (1 + NOISE / batch)
    return {0.2: updates, 0.8: None}.get(rate, 2 * updates)


def log(noise):
    """A reader of logs with that noise scale all along."""
    scale = {"noise_scale": {"images": noise, "error": 10.0}}
    return lambda folder: {"train": [{"step": step, "epoch": step / 960, **scale} for step in range(100, 9000, 100)]}


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    def keys(run):
        return dict(text.split("=", 1) for text in run.overrides)

    def curve(run, kind, key):
        given = keys(run)
        batch, reached = int(given["batch.global"]), needed(int(given["batch.global"]), float(given["schedule.peak"]))
        if reached is None:
            return [1.0, 2.0], [0.3, 0.79]
        epoch = reached / PER_EPOCH[batch]
        return [0.5 * epoch, 1.5 * epoch, 2 * epoch], [0.6, 1.0, 0.7]  # the target lies in the middle of 0.6 and 1

    monkeypatch.setattr(predicted, "curve", curve)
    monkeypatch.setattr(predicted, "read_events", log(NOISE))


def test_a_run_that_follows_the_published_curve_is_predicted():
    rows = predicted.found()
    assert [row.batch for row in rows] == list(predicted.UPDATES)
    assert {row.rate for row in rows} == {0.2}
    for row in rows:
        assert row.trained == pytest.approx(FEWEST * (1 + NOISE / row.batch))
        assert row.predicted == pytest.approx(row.trained)
    assert predicted.errors(rows) == pytest.approx([0, 0, 0, 0])


def test_a_noise_scale_that_is_wrong_is_seen(monkeypatch):
    monkeypatch.setattr(predicted, "read_events", log(4 * NOISE))
    assert predicted.errors(predicted.found())[-1] > 0.4


def test_a_batch_that_never_comes_there_is_an_error(monkeypatch):
    monkeypatch.setattr(predicted, "curve", lambda *_: ([1.0], [0.5]))
    with pytest.raises(ValueError, match="no rate reaches 80% with a batch of 48"):
        predicted.found()

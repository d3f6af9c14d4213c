"""Updates to a target, and their prediction from the smallest batch, on runs whose answer is known."""

import pytest

from benchmarks.evidence import predicted_updates as predicted

PER_EPOCH = {batch: 15360 // batch for batch in predicted.UPDATES}
NOISE, FEWEST = 60.0, 200.0  # images; updates that the largest batch of all would take


def needed(batch, rate):
    """By the published curve at the third rate, twice as many at others; never at the largest."""
    updates = FEWEST * (1 + NOISE / batch)
    return {0.018: updates, 0.054: None}.get(round(rate, 4), 2 * updates)


def log(noise):
    """A reader of logs with that noise scale all along."""
    scale = {"noise_scale": {"images": noise, "error": 10.0}}
    return lambda run: {"train": [{"step": step, "epoch": step / 1920, **scale} for step in range(100, 9000, 100)]}


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    def keys(run):
        return dict(text.split("=", 1) for text in run.overrides)

    def curve(run, kind, key):
        given = keys(run)
        batch = int(given["batch.global"])
        reached = needed(batch, float(given["schedule.peak"]) / (batch / 8) ** 0.5)
        places = range(1, 41)
        if reached is None:
            return list(places), [0.59] * 40
        # Straight, so a moving mean of points is that of the middle; the target is where `reached` is.
        epochs = [place / 20 * reached / PER_EPOCH[batch] for place in places]
        return epochs, [0.1 + 0.5 * place / 20 for place in places]

    monkeypatch.setattr("benchmarks.evidence.runs.curve", curve)
    monkeypatch.setattr(predicted, "events_of", log(NOISE))


def test_a_run_that_follows_the_published_curve_is_predicted():
    rows = predicted.found()
    assert [row.batch for row in rows] == list(predicted.UPDATES)
    assert {row.rate for row in rows} == {0.018}
    for row in rows:
        assert row.trained == pytest.approx(FEWEST * (1 + NOISE / row.batch))
        assert row.predicted == pytest.approx(row.trained)
    assert predicted.errors(rows) == pytest.approx([0, 0, 0, 0])


def test_a_noise_scale_that_is_wrong_is_seen(monkeypatch):
    monkeypatch.setattr(predicted, "events_of", log(4 * NOISE))
    assert predicted.errors(predicted.found())[-1] > 0.4


def test_a_batch_that_never_comes_there_is_an_error(monkeypatch):
    monkeypatch.setattr("benchmarks.evidence.runs.curve", lambda *_: ([1.0] * 9, [0.5] * 9))
    with pytest.raises(ValueError, match="no rate reaches 60% with a batch of 8"):
        predicted.found()

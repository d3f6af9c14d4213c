"""Updates to a target, and their prediction from the smallest batch, on runs whose answer is known."""

import pytest

from benchmarks.evidence import predicted_updates as predicted

PER_EPOCH = {batch: 15360 // batch for batch in predicted.UPDATES}
NOISE, FEWEST = 60.0, 200.0  # images; updates that the largest batch of all would take


def needed(batch, rate):
    """By the published curve at the third rate, twice as many at others; never at the largest."""
    updates = FEWEST * (1 + NOISE / batch)
    return {0.018: updates, 0.054: None}.get(round(rate, 4), 2 * updates)


def log(run):
    """Its events, with that noise scale all along."""
    scale = {"noise_scale": {"images": NOISE, "error": 10.0}}
    return {"train": [{"step": step, "epoch": step / 1920, **scale} for step in range(100, 9000, 100)]}


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
    monkeypatch.setattr(predicted, "events_of", log)


def test_a_run_that_follows_the_published_curve_is_predicted():
    rows = predicted.found()
    assert [row.batch for row in rows] == list(predicted.UPDATES)
    assert {row.rate for row in rows} == {0.018}
    for row in rows:
        assert row.trained == pytest.approx(FEWEST * (1 + NOISE / row.batch))
        assert row.predicted == pytest.approx(row.trained)
    assert predicted.errors(rows) == pytest.approx([0, 0, 0, 0])
    assert predicted.errors([rows[0], rows[1]._replace(predicted=2 * rows[1].trained)]) == pytest.approx([1])


def test_a_batch_that_never_comes_there_is_an_error(monkeypatch):
    monkeypatch.setattr("benchmarks.evidence.runs.curve", lambda *_: ([1.0] * 9, [0.5] * 9))
    with pytest.raises(ValueError, match="no rate reaches 60% with a batch of 8"):
        predicted.found()

"""Updates of several steps: as one larger step, and the same on any topology."""

import itertools

import pytest
import torch

from recipe.course import Update
from tests.engines import worlds
from tests.engines.worlds import FLOAT32, case, engine_of, micro_batches, outcome, single
from tests.tensors import assert_bitwise_equal

UPDATES = (Update(0, 1, 0), Update(1, 2, 1), Update(3, 3, 2))
STILL = ("model.dropout=0", "model.drop_path=0", "data.mixup=0", "data.cutmix=null", "log.noise_scale=false")


def grow(engine, updates):
    """Losses, hits and images of each update."""
    found = []
    for update in updates:
        steps = range(update.step, update.end)
        batches = itertools.chain.from_iterable(micro_batches(step, engine) for step in steps)
        result = engine.train_step(batches, update.step, 2.0, update=update)
        found.append((result.loss.item(), result.correct.item(), result.images))
    return found


def test_an_update_of_two_steps_is_one_of_twice_the_batch():
    """To the bit where nothing is drawn: same images in the same order, added up in one buffer, same divisor."""
    two, large = engine_of(single(), (*FLOAT32, *STILL)), engine_of(single(), (*FLOAT32, *STILL, "batch.global=24"))
    ((loss, correct, images),) = grow(two, [Update(0, 2, 0)])
    given = itertools.chain(micro_batches(0, two), micro_batches(1, two))
    result = large.train_step(given, 0, 2.0)
    assert (loss, correct, images) == (result.loss.item(), result.correct.item(), 24) and result.images == 24
    for part in ("weights", "momentum_buffer"):
        assert_bitwise_equal(two.state_dict()[part], large.state_dict()[part])


def test_random_draws_are_those_of_the_images_own_steps():
    """Dropout, mixing and labels: with a rate of 0 losses of two steps together are the mean of those one by one."""
    one, both = engine_of(single(), FLOAT32), engine_of(single(), FLOAT32)
    apart = [one.train_step(micro_batches(step, one), step, 0.0) for step in (3, 4)]
    together = both.train_step(
        itertools.chain(micro_batches(3, both), micro_batches(4, both)), 3, 0.0, update=Update(3, 2, 1)
    )
    assert together.loss.item() == pytest.approx(sum(each.loss.item() for each in apart) / 2, rel=1e-6)
    assert together.correct.item() == sum(each.correct.item() for each in apart)


def test_averages_over_steps_count_the_steps():
    """The average after an update of three steps is that of its weights three times."""
    engine = engine_of(single(), FLOAT32)
    grow(engine, UPDATES[:1])
    before = engine.state_dict()["averages"]["step_average"]
    grow(engine, [Update(1, 3, 1)])
    state = engine.state_dict()
    after, decay = state["averages"]["step_average"], 0.9
    assert (before["count"].item(), after["count"].item()) == (1, 4)
    share = (1 - decay**3) / (1 - decay**4)
    for name, weight in state["weights"].items():
        expected = before["weights"][name].double().lerp(weight.double(), share)
        torch.testing.assert_close(after["weights"][name].double(), expected, rtol=1e-5, atol=1e-7)


def grows(processes):
    """A case: what updates of one, two and three steps give, with every kind of random draw."""
    engine = engine_of(processes, FLOAT32)
    found = grow(engine, UPDATES)
    return found, worlds.digest(engine.weights.state_dict()), (found, engine.state_dict())


@pytest.mark.multiprocess
@pytest.mark.parametrize("run", [case(1, 2, grows), case(2, 1, grows), case(2, 2, grows, slow=True)])
def test_replicas_and_stages_change_nothing_but_roundings(run):
    found, state = outcome(run)
    expected, expected_state = grows(single())[2]
    assert [images for *_, images in found] == [12, 24, 36]
    for ours, theirs in zip(found, expected):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5) and abs(ours[1] - theirs[1]) <= 1
    assert worlds.distance(state, expected_state) < 1e-4

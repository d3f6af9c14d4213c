"""Updates of several steps: as one larger step, and the same on any topology."""

import itertools

import pytest

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


def grows(processes):
    """A case: what updates of one, two and three steps give, with every kind of random draw."""
    engine = engine_of(processes, FLOAT32)
    found = grow(engine, UPDATES)
    return found, worlds.digest(engine.weights.state_dict()), (found, engine.state_dict())


@pytest.mark.multiprocess
@pytest.mark.parametrize("run", [case(2, 2, grows)])
def test_replicas_and_stages_change_nothing_but_roundings(run):
    found, state = outcome(run)
    expected, expected_state = grows(single())[2]
    assert [images for *_, images in found] == [12, 24, 36]
    for ours, theirs in zip(found, expected):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5) and abs(ours[1] - theirs[1]) <= 1
    assert worlds.distance(state, expected_state) < 1e-4

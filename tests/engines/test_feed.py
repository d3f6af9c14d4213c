"""Micro batches of ranks where images do not enter; what listeners are told, and when."""

import contextlib

import pytest
import torch

from engines import feed
from engines.base import one_step
from engines.listeners import Listeners, StepListener
from recipe.division import Batch
from tests.engines import worlds
from tests.engines.worlds import case, engine_of, micro_batches, outcome

CPU = torch.device("cpu")


def test_where_no_images_enter_there_are_no_micro_batches_and_they_can_be_closed():
    """As the run does at its end, on each rank."""
    engine = engine_of(worlds.single(), (), steps_per_epoch=2)
    batches = feed.training_batches(
        None,
        engine._settings,
        batch=Batch(12, 3, 4, 1, 2),
        replica=0,
        steps=range(2),
        device=CPU,
    )
    assert list(batches) == [] and batches.waited() == 0
    batches.close()


def scored(processes, most):
    """A case: scores of batches, and how many messages with labels are kept."""
    feed._MOST_SENT = most
    engine = engine_of(processes, ())
    scores = worlds.evaluation(engine)
    return scores, len(engine._feed._sent), (scores, len(engine._feed._sent))


@pytest.mark.multiprocess
@pytest.mark.parametrize("run", [case(2, 1, scored, 1), case(2, 1, scored, 64)])
def test_labels_that_have_arrived_are_not_kept(run):
    """Of a validation in two stages; without training nothing else would wait for them."""
    scores, kept = outcome(run)
    assert scores == worlds.evaluation(engine_of(worlds.single(), ()))
    assert kept == min(4, run.arguments[0])


class Told(StepListener):
    """Notes what it is told in a step, and adds a number to the message."""

    def __init__(self):
        self.events = []

    def begin(self, update):
        self.events.append(("begin", update))

    def computed(self, divisor):
        self.events.append(("computed", divisor.item()))

    def exchanged(self, divisor):
        self.events.append(("exchanged", divisor.item()))

    def contribution(self):
        return {"told": torch.tensor([3.0, 4.0], dtype=torch.float64)}

    def agreed(self, sums, finite):
        self.events.append(("agreed", sums["told"].tolist(), finite.item()))

    def applied(self, update, finite):
        self.events.append(("applied", update))

    @contextlib.contextmanager
    def span(self, kind, number):
        self.events.append((kind, number))
        yield


def test_a_listener_is_called_between_the_phases_and_its_numbers_are_added_up():
    """The divisor is the loss scale times the micro batches of the step."""
    engine = engine_of(worlds.single(), ("precision.loss_scale=128",), steps_per_epoch=2)
    told = Told()
    engine._listeners = Listeners([engine._statistics, told])
    engine.train_step(micro_batches(0, engine), one_step(0), 0.1)
    divisor = 128.0 * engine.batch.micro_batches
    phases = [event for event in told.events if event[0] not in ("load", "forward", "backward")]
    assert phases == [
        ("begin", one_step(0)),
        ("compute", -1),
        ("computed", divisor),
        ("exchange", -1),
        ("exchanged", divisor),
        ("update", -1),
        ("agreed", [3.0, 4.0], True),
        ("exchange", -1),
        ("applied", one_step(0)),
    ]

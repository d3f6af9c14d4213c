"""An engine that follows a script, for tests of the loop above it."""

import contextlib

import torch

from data.batches import MicroBatch
from engines.base import Counts, Engine, StepResult
from optim.norms import Norms
from parallel.processes import Processes
from parallel.topology import Topology
from recipe.division import Batch

EMPTY = MicroBatch(
    torch.zeros(1, 3, 8, 8, dtype=torch.uint8),
    torch.zeros(1, dtype=torch.int64),
    None,
    valid=1,
    number=0,
    step=0,
    unreadable=(),
)


class ScriptedEngine(Engine):
    """Counts steps instead of training.

    Step n has loss n, n hits among the 24 images, and gradient norm 10 n.

    before: called with the number of each step. finite: which steps are not skipped. averaging: the
    average over epochs scores one hit more for each epoch that ended. waited: seconds that images
    were waited for, by steps done.
    """

    device = torch.device("cpu")
    training_batches = evaluation_batches = None  # the loop is given what they would make
    predict_step = load_weights = None  # not called
    processes = Processes(Topology(), device)
    topology = Topology()
    notes = ()
    shapes = dict.fromkeys("abc", ())
    batch = Batch(24, 24, 1, 1, 1)

    def __init__(
        self,
        before=lambda step: None,
        finite=lambda step: True,
        loss=float,
        images=24,
        unreadable=(),
        averaging=False,
        waited=lambda steps: 0.0,
    ):
        self._before = before
        self._finite = finite
        self._loss = loss
        self._waited = waited
        self._images = images
        self._unreadable = unreadable
        self._averaging = averaging
        self._extra_hits = 0
        self.steps = []
        self.rates = []
        self.measured = []
        self.evaluated_after = []
        self.epoch_ends = []
        self._skipped = self._in_row = 0

    def data_wait(self):
        return self._waited(len(self.steps))

    def train_step(self, micro_batches, update, lr, measure=False):
        step = update.step
        self._before(step)
        next(micro_batches)
        self.steps.append(step)
        self.rates.append(lr)
        self.measured += [step] * measure
        finite = self._finite(step)
        self._skipped = self._skipped + (not finite)
        self._in_row = 0 if finite else self._in_row + 1
        norms = Norms(
            *(torch.tensor(10.0 * step + n) for n in range(3)),
            trust={"stem": torch.tensor(step / 3)},
        )
        loss, hits = (self._loss(step), step) if self._images else (0.0, 0)
        return StepResult(
            torch.tensor(float(loss)),
            torch.tensor(hits),
            self._images,
            *map(torch.tensor, (self._skipped, self._in_row, 128.0)),
            norms if measure else None,
            self._unreadable,
        )

    def evaluate_step(self, batch):
        if not self._extra_hits:
            self.evaluated_after.append(len(self.steps))
        hits = torch.tensor(len(self.steps) + self._extra_hits)
        return Counts(10, torch.tensor(5.0, dtype=torch.float64), hits, torch.tensor(9))

    def end_epoch(self):
        self.epoch_ends.append(len(self.steps))

    def averages(self):
        return ("epoch_average",) if self._averaging and self.epoch_ends else ()

    @contextlib.contextmanager
    def using(self, weights):
        self._extra_hits = {"trained": 0, "epoch_average": len(self.epoch_ends)}[weights]
        yield
        self._extra_hits = 0

    def state_dict(self):
        return {"steps": {"done": torch.tensor(len(self.steps))}}

    def load_state_dict(self, state):
        self.steps = list(range(state["steps"]["done"]))

    def peak_flops(self):
        return 1e9

    def close(self):
        pass

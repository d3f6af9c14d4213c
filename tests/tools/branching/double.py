"""A double of train.py that takes a tenth of a second.

    python double.py --config CONFIG run.output=FOLDER

It keeps what branches rely on: the lock, the checkpoint that it begins from, an evaluation and an
end in metrics.jsonl, SIGTERM answered by 75. Its loss is that of SGD on a noisy quadratic
(`loss_of`); the noise is larger later in the run.

Environment:
    DOUBLE_SLOW: a branch that takes a minute.
    DOUBLE_FAILS: a branch that ends with the exit code DOUBLE_CODE.
"""

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path

import yaml

from tests.tools.branching.quadratic import expected

# the latter takes longer than all else
LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
LINE = "step 7: the disk is full; make room"
RATE = 0.1  # of the quadratic, at the run's own batch
EARLY = 500  # steps
FACTORS = {"none": lambda multiple: 1.0, "sqrt": lambda multiple: multiple**0.5, "linear": float}


def loss_of(step, multiple, rule, order, steps):
    """Each order has another loss, by less than the tolerance."""
    loss = expected(0.0 if step < EARLY else 10.0, RATE, multiple, FACTORS[rule](multiple), steps)
    return loss * (1 + 0.005 * order)


def main(arguments):
    folder = Path(arguments[2].removeprefix("run.output="))
    recipe = yaml.load(Path(arguments[1]).read_text(), LOADER)
    with open(folder / "lock", "a+") as held:
        fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return train(folder, recipe["run"], recipe["batch"])


def train(folder, run, batch):
    step = max(
        int(path.stem.split("-")[1]) for path in (folder / "checkpoints").glob("step-*.json")
    )
    with open(folder / "starts", "a") as stream:
        stream.write(f"{os.getpid()}\n")
    asked = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    end = time.monotonic() + (60 if os.environ.get("DOUBLE_SLOW") == folder.name else 0)
    while time.monotonic() < end:
        time.sleep(0.02)
        if asked:
            return 75
    if os.environ.get("DOUBLE_FAILS") == folder.name:
        print(LINE, file=sys.stderr)
        return int(os.environ["DOUBLE_CODE"])
    size = batch["global"]
    pairs = batch["schedule"]
    multiple = int(pairs[-1][1]) // size if pairs else 1
    loss = loss_of(step, multiple, batch["rate_rule"], run["seed"], run["steps"] - step)
    events = [{"event": "eval", "loss": loss}, {"event": "end", "images": run["steps"] * size}]
    lines = [
        json.dumps({**event, "step": run["steps"], "top1": 0.5, "seconds": 1.0}) for event in events
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

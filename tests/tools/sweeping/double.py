"""A double of train.py that takes milliseconds: python double.py --config RECIPE [section.key=value
...]

It keeps what a sweep relies on: lock, metrics, checkpoints, resume, SIGTERM saved and answered by
75. Its top-1 is a function of momentum, peak and epoch (`top1`). DOUBLE_SECONDS: of an epoch, in
all trials or the one that DOUBLE_SLOW (last digit) names. DOUBLE_NEEDS: a file without which the
trials of DOUBLE_NEEDS_IN (digits) fail.
"""

import fcntl
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

EPOCHS = 4
STEPS_PER_EPOCH = 22


def top1(momentum, peak, epoch):
    """Best at momentum 0.88 and peak 2, more with every epoch."""
    return 0.9 - 20 * (momentum - 0.88) ** 2 - 0.02 * math.log(peak / 2) ** 2 - 0.1 * 0.5**epoch


def parse(overrides):
    pairs = (text.partition("=") for text in overrides)
    return {key: json.loads(value) for key, _, value in pairs if value[:1] in '"0123456789tfn['}


def main(arguments):
    values = parse(arguments[2:])
    folder = Path(values["run.output"])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a+") as held:
        fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        resumes = (
            "run.resume=auto" in arguments or "resume: never" not in Path(arguments[1]).read_text()
        )
        return train(folder, values, resumes)


def train(folder, values, resumes):
    metrics = folder / "metrics.jsonl"
    checkpoint = folder / "checkpoint"
    done, length = json.loads(checkpoint.read_text()) if resumes and checkpoint.exists() else (0, 0)
    needed = os.environ.get("DOUBLE_NEEDS")
    trials = os.environ.get("DOUBLE_NEEDS_IN", "0123456789")
    if needed and values["run.name"][-1] in trials and not Path(needed).exists():
        print(
            f"{folder}: data.root {needed}: no such folder; give data.root=FOLDER", file=sys.stderr
        )
        return 2
    with open(folder / "starts", "a") as stream:
        stream.write(
            json.dumps({"pid": os.getpid(), "epoch": done, "time": time.time(), "values": values})
            + "\n"
        )
    if done == EPOCHS:
        return 0
    slow = os.environ.get("DOUBLE_SLOW")
    pause = (
        float(os.environ.get("DOUBLE_SECONDS", 0)) if slow in (None, values["run.name"][-1]) else 0
    )
    asked = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    with open(metrics, "ab") as stream:
        stream.truncate(length)
        for epoch in range(done + 1, EPOCHS + 1):
            time.sleep(pause)
            if values["optimizer.momentum"] > float(os.environ.get("DOUBLE_FAILS_ABOVE", "inf")):
                print(
                    "step 7: the weights are lost; start a new run with a lower schedule.peak",
                    file=sys.stderr,
                )
                return 1
            score = top1(values["optimizer.momentum"], values["schedule.peak"], epoch)
            event = {
                "event": "eval",
                "step": epoch * STEPS_PER_EPOCH,
                "epoch": float(epoch),
                "top1": score,
            }
            stream.write((json.dumps({**event, "top5": 1.0, "loss": 1 - score}) + "\n").encode())
            if epoch == EPOCHS:
                end = {
                    "event": "end",
                    "step": EPOCHS * STEPS_PER_EPOCH,
                    "top1": score,
                    "seconds": 1.5,
                }
                stream.write((json.dumps(end) + "\n").encode())
            stream.flush()
            temporary = folder / "checkpoint.tmp"
            temporary.write_text(json.dumps([epoch, os.fstat(stream.fileno()).st_size]))
            temporary.replace(checkpoint)
            if asked and epoch < EPOCHS:
                return 75
            if os.environ.get("DOUBLE_KILLED") and done == 0 and epoch == 2:
                os.kill(os.getpid(), signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

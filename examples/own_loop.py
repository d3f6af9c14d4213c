"""Train a torch module of your own with LARS, float16 weights and a sparse exchange.

    python -m examples.own_loop                                 # one process
    torchrun --nproc-per-node 2 -m examples.own_loop            # two replicas

`docs/library.md` explains the optimizer. With the package installed (`pip install .`), import it
by `from largebatch import DistributedOptimizer`.
"""

import torch
from torch import distributed, nn

from data.digits import DigitsSource
from engines.own_loop import DistributedOptimizer

BATCH = 64  # images of a replica and update
UPDATES = 150
PEAK_RATE = 4.0


def load(split):
    """Return images [N, 3, 8, 8] from 0 to 1 and labels [N] of a `split` of the digits."""
    source = DigitsSource(split)
    images = torch.stack(
        [torch.as_tensor(source.read(index)) for index in range(len(source.labels))]
    )
    return images / 255, torch.as_tensor(source.labels)


def main():
    """Train on digits, and return the share of validation images that are recognised."""
    replicated = distributed.is_torchelastic_launched()
    if replicated:
        distributed.init_process_group("gloo")  # "nccl" on GPUs

    # Replicas may begin with different weights: the optimizer gives all of them the first one's.
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10))
    sections = {  # a recipe's keys, with its defaults and checks
        # At the full rate the biases of so small a model diverge.
        "optimizer": {"name": "lars", "momentum": 0.9, "skip_lr_scale": 0.01},
        "precision": {"weights": "float16", "rounding": "stochastic"},
        "exchange": {"method": "topk", "density": 0.1},
    }
    optimizer = DistributedOptimizer(module, sections)

    # Each replica draws images of its own; torch's DistributedSampler would do as well.
    draws = torch.Generator().manual_seed(distributed.get_rank() if replicated else 0)
    images, labels = load("train")
    for update in range(UPDATES):
        chosen = torch.randint(len(labels), (BATCH,), generator=draws)
        loss = nn.functional.cross_entropy(module(images[chosen]), labels[chosen])
        optimizer.backward(loss)
        optimizer.step(lr=PEAK_RATE * (1 - update / UPDATES))

    images, labels = load("validation")
    accuracy = (module(images).argmax(dim=1) == labels).float().mean().item()
    print(f"top-1 {100 * accuracy:.1f} %")
    if replicated:
        distributed.destroy_process_group()
    return accuracy


if __name__ == "__main__":
    main()

"""Send a tenth of the gradients in a loop with torch's DistributedDataParallel and SGD.

    torchrun --nproc-per-node 2 -m examples.ddp_hook

`docs/library.md` says when the hook suits. With the package installed (`pip install .`), import
it by `from largebatch import SparseState, sparse_hook`.
"""

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from examples.own_loop import BATCH, UPDATES, load
from parallel.ddp_hook import SparseState, sparse_hook


def main():
    """Train on digits, and return the share of validation images that are recognised."""
    distributed.init_process_group("gloo")  # "nccl" on GPUs
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10))
    model = DistributedDataParallel(module)

    # The largest tenth of each bucket travels now, in 8 bits. The rest is added to later gradients.
    model.register_comm_hook(SparseState(density=0.1, wire=8), sparse_hook)

    # Steps of SGD are linear in the gradient, so a value that is sent later counts as much.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    # Each replica draws images of its own; torch's DistributedSampler would do as well.
    draws = torch.Generator().manual_seed(distributed.get_rank())
    images, labels = load("train")
    for _ in range(UPDATES):
        chosen = torch.randint(len(labels), (BATCH,), generator=draws)
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    images, labels = load("validation")
    accuracy = (module(images).argmax(dim=1) == labels).float().mean().item()
    print(f"top-1 {100 * accuracy:.1f} %")
    distributed.destroy_process_group()
    return accuracy


if __name__ == "__main__":
    main()

"""Micro batches of noise, for engines of the tiny recipe."""

import torch

from data.batches import MicroBatch


def noise_images(count, seed=0, classes=10, size=16):
    """Random pixels and labels: uint8 [count, 3, size, size], int64 [count]."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
    return images, torch.randint(0, classes, (count,), generator=generator)


def as_micro_batches(images, labels, micro, step=0):
    """The images in order as whole micro batches."""
    for number, start in enumerate(range(0, len(images), micro)):
        rows = slice(start, start + micro)
        yield MicroBatch(
            images[rows],
            labels[rows],
            torch.arange(start, start + micro),
            valid=micro,
            number=number,
            step=step,
            unreadable=(),
        )


def micro_batches(step, micro=12, count=24, valid=None, size=16):
    """The images of a step, other ones in each."""
    for batch in as_micro_batches(*noise_images(count, step, size=size), micro, step):
        yield batch._replace(valid=valid or micro)

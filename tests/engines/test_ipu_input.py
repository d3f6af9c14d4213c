"""What an instance reads; that its images, labels and mixing are those of other engines, tests/ipu
have."""

import numpy as np
import pytest
import torch

from data.base import UnreadableImage
from data.epochs import RunOrder
from data.loader import TrainingBatches
from data.sources import open_source
from engines.ipu_input import EvaluationFeed, Positions, TrainingFeed, padded
from recipe.batch import divide

GLYPHS = (
    "data.source=glyphs",
    "data.train_images=60",
    "data.validation_images=50",
    "batch.global=24",
    "batch.micro=4",
)


def plan_of(tiny, *overrides):
    recipe = tiny(
        *GLYPHS, "data.mixup=0.3", "data.cutmix=0.85", "data.augment=randaugment", *overrides
    )
    return recipe, open_source(recipe.data, recipe.model.classes, "train")


def positions_of(source, recipe, steps):
    batch = divide(recipe, 1)
    order = RunOrder(source, recipe.data, recipe.run.seed, batch.global_)
    return Positions(order, steps, micro=batch.micro, size=recipe.model.image_size)


def evaluation_feed(source, recipe, instance, instances):
    size = recipe.model.image_size
    return EvaluationFeed(source, recipe.data, 8, size=size, instance=instance, instances=instances)


class Loader:
    """In the place of PopTorch's: two combined batches of 24."""

    def __init__(self, positions):
        self.batches = [
            [torch.stack(part) for part in zip(*(positions[i] for i in range(s, s + 24)))]
            for s in (0, 24)
        ]
        self.ended = False

    def __iter__(self):
        return iter(self.batches)

    def terminate(self):
        self.ended = True


@pytest.mark.parametrize("balance", ["none", "sampling"])
def test_repeated_images_are_those_of_other_engines(tiny, balance):
    """Images and labels of every position against the loader's micro batches, over the end of an
    epoch."""
    recipe, source = plan_of(tiny, "data.repeats=3", f"data.balance={balance}")
    positions = positions_of(source, recipe, range(3))
    batches = TrainingBatches(
        RunOrder(source, recipe.data, recipe.run.seed, 24),
        range(3),
        image_size=recipe.model.image_size,
        micro=4,
    )
    images, labels = zip(*((batch.images, batch.labels) for batch in batches))
    found = [positions[position] for position in range(3 * 24)]
    assert torch.equal(torch.stack([image for image, _, _ in found]), torch.cat(images))
    assert [int(label) for _, label, _ in found] == torch.cat(labels).tolist()
    assert len(set(torch.cat([batch.flatten(1) for batch in images]).sum(1).tolist())) > 60, (
        "draws differ"
    )


def test_a_feed_gives_steps_names_an_unreadable_image_and_ends_its_loader(tiny, monkeypatch):
    recipe, source = plan_of(tiny)
    steps = range(5, 7)
    reads = source.read
    damaged = int(source.order(recipe.run.seed, 0)[24 + 7])  # of the second step of an epoch

    def read(index):
        if index == damaged:
            raise UnreadableImage("glyph.png: cut off")
        return reads(index)

    feed = TrainingFeed(positions_of(source, recipe, steps), steps, Loader)
    assert [step.step for step in feed] == [5, 6]
    monkeypatch.setattr(source, "read", read)
    feed = TrainingFeed(positions_of(source, recipe, range(2)), range(2), Loader)
    first = next(feed)
    assert first.images.shape == (24, 3, 16, 16) and first.mixing.shape == (24, 6)
    with pytest.raises(UnreadableImage, match=r"^glyph.png: cut off; mend or remove the file$"):
        next(feed)
    monkeypatch.setattr(source, "read", reads)
    with pytest.raises(UnreadableImage, match="only the second time"):
        feed._positions.complain(24 + 7)
    feed.close()
    assert feed._loader.ended


@pytest.mark.parametrize("instances", [1, 4])
def test_all_images_are_evaluated_once_in_as_many_batches_everywhere(tiny, instances):
    recipe, _ = plan_of(tiny)
    source = open_source(recipe.data, recipe.model.classes, "validation")
    feeds = [evaluation_feed(source, recipe, number, instances) for number in range(instances)]
    found = [list(feed) for feed in feeds]
    assert len({len(each) for each in found}) == 1
    indices = np.concatenate([batch.indices[: batch.valid] for each in found for batch in each])
    assert indices.tolist() == list(range(50))
    assert all(batch.images.shape == (8, 3, 16, 16) for each in found for batch in each)
    for feed in feeds:
        feed.close()


def test_an_unreadable_validation_image_is_named_without_advice_to_leave_it_out(tiny, monkeypatch):
    """Which IPUs cannot follow. The reason keeps all it says."""
    recipe, _ = plan_of(tiny)
    source = open_source(recipe.data, recipe.model.classes, "validation")

    def torn(index):
        raise UnreadableImage("a.tar/b.jpg: too much came; no ranges")

    monkeypatch.setattr(source, "read", torn)
    feed = evaluation_feed(source, recipe, 0, 1)
    with pytest.raises(
        UnreadableImage, match=r"^a.tar/b.jpg: too much came; no ranges; mend or remove the file$"
    ):
        list(feed)
    feed.close()


def test_batches_of_any_size_come_in_contiguous_parts_that_are_filled_up():
    """Decoders give images channel by channel, which PopTorch would copy with a warning."""
    images = torch.arange(36, dtype=torch.uint8).view(3, 2, 2, 3).permute(0, 3, 1, 2)
    parts = padded(images, 2)
    assert all(part.is_contiguous() for part in parts)
    assert torch.equal(torch.cat(parts), torch.cat([images, torch.zeros_like(images[:1])]))
    (part,) = padded(images, 3)
    assert torch.equal(part, images)

"""Runs whose images are balanced, repeated, mixed and augmented: stopped and resumed, on replicas
and stages."""

import numpy as np
import pytest
from PIL import Image

from tests import ranks
from tests.training.test_resume import Outcome
from tests.training.test_several_ranks import STOPPED, TWO_STAGES, in_this_process, train_to_the_end

pytestmark = pytest.mark.multiprocess

IMAGES = {"common": 90, "rare": 12, "single": 3}
SCORED = 4  # images of each class


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Folder of noise, of which one class is much rarer than another."""
    root = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for split, counts in (("train", IMAGES), ("val", dict.fromkeys(IMAGES, SCORED))):
        for name, images in counts.items():
            (root / split / name).mkdir(parents=True)
            for number in range(images):
                pixels = random.integers(0, 256, (10, 10, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")
    return root


# What a recipe of timm does to images and targets, all at once.
AUGMENTED = (
    "data.balance=sampling",
    "data.repeats=2",
    "data.loss=bce",
    "data.bce_threshold=0.2",
    "data.mixing=timm",
    "data.mixup=0.8",
    "data.cutmix=1",
    "data.augment=three_augment",
    "data.color_jitter=0.3",
    "data.random_erasing=0.5",
    "data.random_erasing_mode=pixel",
)


def given(photos, *keys):
    source = ("data.source=folder", f"data.root={photos}", "model.classes=3", *keys)
    # Sums of the noise meter over stages are added in another order.
    return (*ranks.SMALL[4:], *source, "log.noise_scale=false")


@pytest.fixture(
    scope="module", params=[("data.balance=loss",), AUGMENTED], ids=["weighted", "augmented"]
)
def one(request, photos, tmp_path_factory, _one_thread):
    """Keys, and the folder of their run in one process."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    keys = given(photos, *request.param)
    train_to_the_end(1, *keys, f"run.output={folder}")
    return keys, folder


@pytest.mark.parametrize(
    ("balance", "line"),
    [
        (
            "sampling",
            "data.balance=sampling: 32 images of each class in an epoch; those of the rarest (3 images) up to 11 times",
        ),
        (
            "loss",
            "data.balance=loss: weights of the classes from 0.389 to 11.7 (the rarest class, 3 images)",
        ),
        ("none", None),
    ],
)
def test_a_run_says_what_it_balances(photos, tmp_path, balance, line):
    keys = (*given(photos, f"data.balance={balance}"), "run.steps=3", "run.epochs=null")
    ended = in_this_process(*keys, f"run.output={tmp_path / 'run'}")
    said = [each for each in ended.out if each.startswith("data.balance")]
    assert (ended.code, said) == (0, [line] if line else [])


def test_a_stopped_run_goes_on_to_equal_bits(one, tmp_path):
    keys = (*one[0], f"run.output={tmp_path / 'run'}")
    assert in_this_process(*keys, stop_at=5).code == STOPPED
    train_to_the_end(1, *keys)
    Outcome(tmp_path / "run").assert_same(Outcome(one[1]))


@pytest.mark.parametrize("stages", [pytest.param((), marks=pytest.mark.slow), TWO_STAGES], ids=len)
def test_two_ranks_are_one_process(one, tmp_path, stages):
    """The stage with the loss has no images: it learns from the first how many there are of each
    class."""
    train_to_the_end(2, *one[0], *stages, f"run.output={tmp_path / 'run'}")
    two = Outcome(tmp_path / "run")
    whole = Outcome(one[1])
    assert two.of("train") == whole.of("train")
    assert two.tensors() == whole.tensors()

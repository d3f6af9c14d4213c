"""The same images as a data set of torchvision, as class folders, as lists, shards and parquet
files: the same weights.

Images have the same numbers in each of them, and all draws are functions of the number; PNG keeps
every pixel. So weights, momentum and averages are compared bit for bit.
"""

import itertools

import pytest

from tests import ranks
from tests.conftest import QUICKSTART
from tests.data.image_sets import draw, write_class_folders, write_idx, write_list, write_parquet
from tests.training.test_resume import Outcome
from tests.training.test_several_ranks import in_this_process
from tools import shards

pytestmark = pytest.mark.multiprocess

TRAIN = draw(60)
VALIDATION = draw(30, seed=1)
COUNTS = ("data.train_images=60", "data.validation_images=30")
# Two updates an epoch; the first of the recipe's two image sizes is that of one epoch.
LENGTH = (
    "batch.global=24",
    "batch.micro=6",
    "batch.evaluation=30",
    "checkpoint.every_epochs=1000",
    "log.noise_scale=false",  # a sum over processes
)
# Tables are made beside the test's files, without a network and without bars.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The overrides of each way by its name."""
    root = tmp_path_factory.mktemp("images")
    write_idx(root / "set", packed=True, train=TRAIN, validation=VALIDATION)
    data_set = ("data.source=torchvision", "data.dataset=FashionMNIST", f"data.root={root / 'set'}")
    write_class_folders(root, train=TRAIN, validation=VALIDATION)
    for split, folder in (("train", "train"), ("validation", "val")):
        command = [
            "pack",
            "--config",
            str(QUICKSTART),
            "--split",
            split,
            "--keep-order",
            "--images-per-shard",
            "25",
        ]
        where = [str(root / "shards" / folder), *data_set, *COUNTS]
        assert shards.main([*command, "--workers", "1", *where]) == 0
    write_list(root / "train.csv", root / "train")
    write_list(root / "val.csv", root / "val")
    ways = {
        "torchvision": data_set,
        "folder": ("data.source=folder", f"data.root={root}"),
        "list": ("data.source=list", f"data.root={root}"),
        "shards": ("data.source=shards", f"data.root={root / 'shards'}"),
    }
    try:
        import datasets
    except ImportError:
        return ways
    datasets.disable_progress_bars()
    write_parquet(
        root / "parquet", [str(number) for number in range(10)], train=TRAIN, validation=VALIDATION
    )
    return {**ways, "huggingface": ("data.source=huggingface", f"data.root={root / 'parquet'}")}


def weights(folder, replicas, *overrides):
    """The tensors of a run's last checkpoint."""
    given = (*LENGTH, *COUNTS, *overrides, f"run.output={folder}")
    if replicas == 1:
        ended = [in_this_process(*given)]
    else:
        ended = ranks.train(replicas, *given, **ENVIRONMENT, HF_HOME=str(folder.parent / "hub"))
    assert [(rank.code, rank.errors) for rank in ended] == [(0, [])] * replicas, ended
    return Outcome(folder).tensors()


@pytest.fixture
def all_equal(sources, tmp_path, monkeypatch):
    """all_equal(steps, topologies): trains each way on each (replicas, workers), and compares all
    with the first."""

    def compare(steps, topologies):
        found = {}
        for (way, place), (replicas, workers) in itertools.product(sources.items(), topologies):
            name = f"{way}-{replicas}-{workers}"
            length = (f"run.steps={steps}", f"data.workers={workers}")
            found[name] = weights(tmp_path / name, replicas, *place, *length)
        first = next(iter(found.values()))
        assert {name: each == first for name, each in found.items()} == dict.fromkeys(found, True)

    if "huggingface" in sources:
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return compare


def test_a_few_updates_learn_the_same_from_each(all_equal):
    """Two of an epoch, and the first of another order."""
    all_equal(3, [(1, 0)])


@pytest.mark.slow
def test_sixty_updates_learn_the_same_from_each_with_any_workers_and_replicas(all_equal):
    all_equal(60, [(1, 0), (1, 2), (2, 0), (2, 2)])


def test_other_images_give_other_weights(sources, tmp_path):
    """The comparison above can fail: a pixel of each image is enough."""
    changed = TRAIN._replace(images=TRAIN.images.copy())
    changed.images[:, 5, 5] ^= 128
    other = write_idx(tmp_path / "set", train=changed, validation=VALIDATION)
    keys = ("run.steps=3", "data.workers=0", *sources["torchvision"])
    first = weights(tmp_path / "first", 1, *keys)
    assert weights(tmp_path / "other", 1, *keys, f"data.root={other}") != first

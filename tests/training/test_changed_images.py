"""A run resumes with its own images, or with others where that is accepted; other threads, and
other random bits, get a line."""

import itertools
import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from common.errors import CheckpointError, DataError
from engines.torch_engine import TorchEngine
from optim import rounding
from recipe import loading
from tests.conftest import TINY
from tests.data.image_sets import draw, write_idx
from tests.pictures import write_pictures
from tests.tensors import assert_bitwise_equal, flat
from tests.training.scripted import ScriptedEngine
from tools import shards
from training import loop, resuming
from training.checkpoint import CheckpointFolder
from training.metrics import read_events
from training.progression import Progression
from training.scoring import Scores

OVERRIDES = (
    *TINY,
    "model.classes=2",
    "batch.global=4",
    "batch.micro=4",
    "run.steps=4",
    "checkpoint.every_epochs=1",
    "data.source=folder",
)


@pytest.fixture
def images(tmp_path):
    """Six training and two validation images of two classes."""
    return write_pictures(tmp_path / "images", train=3, val=1)


def one_more(root):
    shutil.copy(root / "train/a/0.png", root / "train/a/9.png")


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        ((), False),
        (("data.validation_folder=train/",), True),
        (("data.train_folder=val/../val",), True),
    ],
    ids=["none", "training", "validation"],
)
def test_a_line_says_that_the_training_images_are_validated_on(session, images, overrides, same):
    said = session(
        *OVERRIDES, f"data.root={images}", "batch.global=2", "batch.micro=2", *overrides, stop_at=1
    )
    assert (
        "\nthe training images are validated on, too: scores say nothing about other images\n"
        in said
    ) == same


def test_other_images_are_refused_unless_they_are_accepted(session, images, tmp_path):
    session(*OVERRIDES, f"data.root={images}", stop_at=1)
    images.rename(tmp_path / "moved")  # the same images elsewhere are the same
    place = (*OVERRIDES, f"data.root={tmp_path / 'moved'}")
    said = session(*place, stop_at=2)
    assert "resuming at step 1 of 4" in said and "images than" not in said
    one_more(tmp_path / "moved")
    with pytest.raises(
        CheckpointError, match=r"step-00000002.pt: saved with other training images than .*s=accept"
    ):
        session(*place)
    said = session(*place, "data.changed_images=accept", stop_at=3)
    assert "resuming at step 2 of 4" in said and "other images than before" in said
    assert "other images" not in session(*place)  # from then on these are the run's


def test_a_recipe_that_names_the_numbers_of_images_goes_on_with_others_once_they_are_accepted(
    session, images, tmp_path
):
    """In folder, checkpoint and mirror alike; from then on the new numbers are the run's."""
    mirror = f"checkpoint.mirror={tmp_path / 'mirror'}"
    place = (*OVERRIDES, f"data.root={images}", "data.validation_images=2", mirror)
    session(*place, "data.train_images=6", stop_at=1)
    one_more(images)
    fault = f"^{tmp_path / 'run'} belongs to a run with .*: data.train_images is 6 there, 7 here; .*s=accept"
    with pytest.raises(CheckpointError, match=fault):
        session(*place, "data.train_images=7")
    with pytest.raises(
        DataError, match=r"7 images, but data.train_images is 6; .*set data.train_images=7"
    ):
        session(*place, "data.train_images=6", "data.changed_images=accept")
    with pytest.raises(CheckpointError, match=r"belongs to another recipe: data.crop_fraction is "):
        session(
            *place, "data.train_images=7", "data.changed_images=accept", "data.crop_fraction=0.9"
        )
    shutil.rmtree(tmp_path / "run")  # filled from the mirror, which has the old number
    said = session(*place, "data.train_images=7", "data.changed_images=accept", stop_at=2)
    assert "restored from" in said and "other images than before" in said
    begun = loading.load(tmp_path / "run" / "config.yaml")
    assert (begun.data.train_images, begun.data.changed_images) == (7, "error")
    shutil.rmtree(tmp_path / "run")
    said = session(*place, "data.train_images=7", stop_at=3)
    assert "resuming at step 2 of 4" in said and "other images" not in said


def test_a_checkpoint_with_another_number_of_images_than_its_folder_says_how_to_go_on(
    session, images, tmp_path
):
    """A session that accepted images may have been killed before its first checkpoint."""
    place = (*OVERRIDES, f"data.root={images}")
    session(*place, "data.train_images=6", stop_at=1)
    one_more(images)
    accepted = (*place, "data.train_images=7")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("train_images: 6", "train_images: 7"))
    with pytest.raises(
        CheckpointError,
        match=r"step-00000001.pt: of another run: data.train_images is 6 .*s=accept",
    ):
        session(*accepted)
    assert "resuming at step 1 of 4" in session(*accepted, "data.changed_images=accept", stop_at=2)


@pytest.fixture
def more(tmp_path):
    """24 training images: six steps of four images an epoch."""
    return write_pictures(tmp_path / "more", train=12, val=1)


def fewer(root):
    """Four images fewer: five steps an epoch."""
    for name in ("0", "1", "2", "3"):
        (root / "train" / "a" / f"{name}.png").unlink()


def trained(folder):
    content = CheckpointFolder(folder / "checkpoints", 2, True).load_newest(warn=pytest.fail)
    return content["progression"]["updates"], flat(content["engine"])


def test_a_growing_batch_goes_on_from_its_own_step(session, more, tmp_path, monkeypatch):
    """Updates of four steps, within epochs of six, then of five: the seventh step is in the midst
    of one of theirs.

    Each step is trained on once, with its own images, also by sessions after that.
    """
    made = []
    train_step = TorchEngine.train_step

    def noted(engine, micro_batches, update, *arguments, **options):
        batches = list(itertools.islice(micro_batches, update.steps))
        assert [batch.step for batch in batches] == list(range(update.step, update.end))
        made.append((update.step, update.steps, update.index))
        return train_step(engine, iter(batches), update, *arguments, **options)

    monkeypatch.setattr(TorchEngine, "train_step", noted)
    run = tmp_path / "run"
    place = (
        *OVERRIDES,
        f"data.root={more}",
        "run.steps=null",
        "run.epochs=3",
        "batch.schedule=[[0,16]]",
    )
    session(*place, stop_at=5)
    assert made == [(0, 4, 0), (4, 2, 1)]
    fewer(more)
    shutil.copytree(run, tmp_path / "before")
    made.clear()
    session(*place, "data.changed_images=accept")
    rest = [(6, 4, 2), (10, 4, 3), (14, 1, 4)]
    assert made == rest
    undisturbed = trained(run)
    shutil.rmtree(run)
    (tmp_path / "before").rename(run)
    made.clear()
    session(*place, "data.changed_images=accept", stop_at=7)
    session(*place)
    assert made == rest
    updates, state = undisturbed
    assert updates == 5
    assert trained(run)[0] == updates
    assert_bitwise_equal(trained(run)[1], state)


@pytest.mark.parametrize(
    "every",
    [
        pytest.param("evaluation.every_epochs=9", marks=pytest.mark.slow),
        "evaluation.every_epochs=0.01",
    ],
)
def test_a_run_that_fewer_images_make_complete_is_scored_with_them_and_ends(
    session, more, tmp_path, every
):
    """Step 17 of 18 is done, and 15 are all now: whether it was scored before or not."""
    place = (*OVERRIDES, f"data.root={more}", "run.steps=null", "run.epochs=3", every)
    session(*place, stop_at=17)
    fewer(more)
    (more / "val" / "b" / "0.png").rename(more / "val" / "b" / "1.png")
    said = session(*place, "data.changed_images=accept")
    assert "step 17 of 15" in said
    assert "step 17 of 15 is done with these images: the run ends with an evaluation" in said
    events = []
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        events.append(json.loads(line))
    last = [(event["event"], event["step"]) for event in events[-3:]]
    assert last == [("eval", 17), ("checkpoint", 17), ("end", 17)]
    assert events[-1]["top1"] == events[-3]["top1"]
    assert "this run is finished" in session(*place)


def test_scores_stay_unless_other_images_end_the_run():
    scores = {"top1": 0.5}
    now = SimpleNamespace(digest="c-d")
    for digest, step, kept in (
        ("c-d", 9, scores),
        ("a-d", 9, {}),
        ("a-d", 8, scores),
        ("", 9, scores),
    ):
        progression = Progression(step=step, scores=scores, images_digest=digest)
        resuming.take_images(progression, now, total=9)
        assert (progression.scores, progression.images_digest) == (kept, "c-d")


def test_scores_of_other_validation_images_are_not_compared(session, more, tmp_path, monkeypatch):
    """Neither by the best top-1 and its line, nor by patience, nor by --best.

    Other training images change nothing.
    """
    scored = iter([0.9, 0.8, 0.3, 0.2, 0.4, 0.3])
    monkeypatch.setattr(loop, "evaluate", lambda *_: Scores(next(scored), 1.0, 1.0, 2, 0))
    place = (
        *OVERRIDES,
        f"data.root={more}",
        "run.steps=6",
        "evaluation.every_epochs=0.1",
        "evaluation.patience=3",
    )
    session(*place, stop_at=2)
    (more / "train" / "b" / "0.png").rename(more / "train" / "b" / "99.png")
    said = session(*place, "data.changed_images=accept", stop_at=3)
    assert "other images than before" in said and "best top1" not in said

    (more / "val" / "b" / "0.png").rename(more / "val" / "b" / "9.png")
    said = session(*place, "data.changed_images=accept", stop_at=4)
    assert (
        "\nthe best top1 so far, 90.00%, is of other validation images and does not count any more\n"
        in said
    )
    said = session(*place)
    assert "best top1 40.00%" in said
    evaluations = read_events(tmp_path / "run")["eval"]
    found = [(event["top1"], event.get("validation_set")) for event in evaluations]
    assert found == [(0.9, None), (0.8, None), (0.3, None), (0.2, 1), (0.4, 1), (0.3, 1)]
    best = CheckpointFolder(tmp_path / "run" / "checkpoints", 3, True).load_best(pytest.fail)
    assert (best["progression"]["step"], best["progression"]["best_of_all"]) == (5, 0.4)


class Replicas(ScriptedEngine):
    """Notes how many replicas get states of their own."""

    loaded = None

    def load_replica_states(self, count, read):
        self.loaded = count


@pytest.mark.parametrize(
    ("images", "digest", "epochs", "loaded"),
    [(240, "new", 1, 0), (239, "new", 1, 2), (240, "old", 1, 2), (240, "new", 0, 2)],
)
def test_replicas_that_more_images_take_back_into_dense_epochs_begin_alike(
    tiny, tmp_path, images, digest, epochs, loaded
):
    """Step 9 is dense in an epoch of 10 steps, not in one of 9: dense updates need the same weights
    everywhere."""
    local = ("exchange.method=local", "exchange.order=fast", f"exchange.dense_epochs={epochs}")
    recipe = tiny(f"run.output={tmp_path}", "data.changed_images=accept", *local)
    progression = {"step": 9, "images_digest": "old"}
    content = {
        "recipe": loading.dump(recipe),
        "progression": progression,
        "engine": {"steps": {"done": 9}},
    }
    checkpoints = CheckpointFolder(tmp_path / "checkpoints", 2, True)
    checkpoints.save(9, content, None, [{"own": torch.zeros(1)}] * 2)
    engine = Replicas()
    found = SimpleNamespace(training_images=images, digest=digest, classes=["a"])
    assert resuming.resume(engine, checkpoints, recipe, found).step == 9
    assert engine.loaded == loaded


def test_other_classes_are_refused_even_where_other_images_are_accepted(session, images):
    """Labels would count other classes: with a renamed to z, b is the first."""
    place = (*OVERRIDES, f"data.root={images}")
    session(*place, stop_at=1)
    for split in ("train", "val"):
        (images / split / "a").rename(images / split / "z")
    with pytest.raises(
        CheckpointError, match=r"saved with other training and validation images than .*s=accept"
    ):
        session(*place)
    said = r"step-00000001.pt: saved with other classes, or in another order \(a is b now, b is z now\); .*init_from="
    with pytest.raises(CheckpointError, match=said):
        session(*place, "data.changed_images=accept")


def test_shards_that_were_packed_anew_are_other_images(session, images, tmp_path):
    place = (*OVERRIDES, "data.source=shards", f"data.root={tmp_path / 'shards'}")

    def pack(*how):
        shutil.rmtree(tmp_path / "shards", ignore_errors=True)
        for split in ("train", "val"):
            command = ("pack", images / split, tmp_path / "shards" / split, "--workers", 1, *how)
            assert shards.main([str(part) for part in command]) == 0

    pack()
    session(*place, stop_at=1)
    pack()
    assert "resuming at step 1" in session(*place, stop_at=2)
    pack("--seed", 1)
    with pytest.raises(
        CheckpointError, match=r"saved with other training and validation images than"
    ):
        session(*place)


def test_other_pixels_of_a_data_set_are_other_images(session, tmp_path):
    """In the same files, under the same names."""
    drawn = draw(20)
    validation = draw(10, seed=1)
    write_idx(tmp_path / "set", train=drawn, validation=validation)
    place = (
        *OVERRIDES,
        "model.classes=10",
        "data.source=torchvision",
        "data.dataset=MNIST",
        f"data.root={tmp_path / 'set'}",
        "data.train_images=20",
        "data.validation_images=10",
    )
    session(*place, stop_at=1)
    # beside those that are read first
    write_idx(tmp_path / "set", packed=True, train=drawn, validation=validation)
    for path in (tmp_path / "set").glob("*-ubyte"):
        path.unlink()
    assert "resuming at step 1" in session(*place, stop_at=2)
    drawn.images[7, 3, 3] ^= 1
    write_idx(tmp_path / "set", packed=True, train=drawn, validation=validation)
    with pytest.raises(
        CheckpointError, match=r"saved with other training images than .*set has now"
    ):
        session(*place)
    assert "other images than before" in session(*place, "data.changed_images=accept")


def test_a_run_of_an_older_version_without_a_digest_is_resumed(session, images, monkeypatch):
    place = (*OVERRIDES, f"data.root={images}")
    with monkeypatch.context() as patch:
        known = set(Progression.__dataclass_fields__) - {"images_digest"}
        patch.setattr(
            "training.loop.asdict",
            lambda progression: {name: vars(progression)[name] for name in known},
        )
        session(*place, stop_at=1)
    one_more(images)
    assert "resuming at step 1 of 4" in session(*place, stop_at=2)


@pytest.mark.parametrize("kind", ["stochastic", pytest.param("nearest", marks=pytest.mark.slow)])
def test_other_threads_and_other_random_bits_that_round_get_a_line(session, monkeypatch, kind):
    few = ("batch.global=4", "batch.micro=4", "run.steps=4", "data.source=glyphs")
    keys = (
        *TINY,
        *few,
        "data.train_images=40",
        "data.validation_images=10",
        f"precision.rounding={kind}",
    )
    try:
        session(*keys, "run.threads=1", stop_at=1)
        said = session(*keys, "run.threads=1", stop_at=2)
        assert (
            "thread here" not in said and "threads here" not in said and "random bits" not in said
        )
        monkeypatch.setattr(rounding, "VERSION", 3)
        said = session(*keys, "run.threads=2", stop_at=3)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert "2 threads here, 1 when the run began" in said and "run.threads=1" in said
    assert ("other random bits from here on: version 3, not 2" in said) is (kind == "stochastic")
    assert "random bits" not in session(*keys, "run.threads=1")

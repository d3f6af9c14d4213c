"""The recipes that come along: they plan, they say whose figures they quote, and they match what
was published."""

import re
from fractions import Fraction

import pytest

import train
from recipe.batch import divide, peak_learning_rate
from recipe.loading import load
from tests.conftest import RECIPES, ROOT

IDS = [str(path.relative_to(ROOT / "configs"))[:-5] for path in RECIPES]
PODS = {"pod16": 8, "pod32": 16, "pod64": 32, "pod128": 64, "pod256": 128}


def named(name):
    return ROOT / "configs" / f"{name}.yaml"


def test_the_promised_recipes_are_there():
    ladder = ("768", "1536", "3072", "6144", "768_rmsprop", "1536_rmsprop", "6144_rmsprop")
    others = {"b4_g16", "pod", "pod16_4stages", "gpu", "quickstart", "evidence"}
    by_name = {"fashion_mnist", "cifar10", "imagenet_huggingface"}
    sequels = {"half_resolution", "finetune", "finetune_timm", "timm", "photos"}
    assert {*PODS, *others, *sequels, *by_name, *(f"ablation/bs{each}" for each in ladder)} == set(
        IDS
    )


@pytest.mark.parametrize("path", RECIPES, ids=IDS)
def test_every_recipe_plans_and_opens_with_command_cost_and_origin(path, capsys):
    """The command names this very file, and what it quotes is said to be published, expected or
    measured."""
    # from a run that is not there
    started = ["model.init_from=null"] if path.stem == "finetune" else []
    averaged = ["model.init_weights=trained"] if started else []
    assert train.main(["--config", str(path), "--dry-run", *started, *averaged]) == 0
    assert "learning rate" in capsys.readouterr().out
    head = path.read_text().split("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines()), (
        "a recipe opens with its comment"
    )
    if path.stem not in ("b4_g16", "pod"):  # bases of others
        assert f"--config {path.relative_to(ROOT)}" in head
    assert re.search("Published|Expected|measured here", head) and re.search("[Mm]easured", head)
    assert load(path).run.name == path.stem, (
        "no two recipes train into the same run folder by default"
    )


@pytest.mark.parametrize(("name", "replicas"), PODS.items())
def test_pod_recipes_divide_as_published(name, replicas):
    """Accumulation 256, 128, 64, 32, 16 at two IPUs a replica: 6144 = 3 x accumulation x replicas
    everywhere."""
    recipe = load(named(name))
    batch = divide(recipe, replicas)
    assert (batch.global_, batch.micro, batch.accumulation, batch.stages) == (
        6144,
        3,
        2048 // replicas,
        2,
    )
    assert batch.replicas * batch.stages == int(name[3:])
    assert (
        f"{batch.global_} = 3 micro x {batch.accumulation} accumulation x {replicas}"
        in named(name).read_text()
    )
    for other in (1, 2, 512):
        # from 1024 on there are fewer than the three micro batches that two stages need
        assert (
            divide(load(named(name), [f"parallel.replicas={other}"])).accumulation == 2048 // other
        )


@pytest.mark.parametrize("size", [768, 1536, 3072, 6144])
def test_the_ladder_changes_the_batch_and_its_rate_only(size):
    rung = load(named(f"ablation/bs{size}"))
    full = load(named("b4_g16"))
    assert peak_learning_rate(rung) == pytest.approx(2**-9.5 * size, rel=1e-5)
    assert (
        rung.batch.global_ == size
        and f"peak rate {2**-9.5 * size:.3f}" in named(f"ablation/bs{size}").read_text()
    )
    same = {"run": full.run, "batch": full.batch}
    assert rung.model_copy(update=same) == full


@pytest.mark.parametrize("size", [768, 1536, 6144])
def test_the_controls_follow_the_published_rules_of_the_batch(size):
    """RMSprop: rate 2^-14 an image, decay of the squares 1 - 2^-14 x batch, exact in binary."""
    recipe = load(named(f"ablation/bs{size}_rmsprop"))
    assert recipe.batch.global_ == size
    assert Fraction(recipe.optimizer.alpha) == 1 - Fraction(size, 2**14)
    assert Fraction(peak_learning_rate(recipe)) == Fraction(size, 2**14)
    optimizer = recipe.optimizer
    schedule = recipe.schedule
    assert (optimizer.name, optimizer.momentum, optimizer.eps) == ("rmsprop", 0.9, 1e-3)
    found = (schedule.name, schedule.warmup_epochs, schedule.decay_rate, schedule.decay_epochs)
    assert found == ("exponential", 5, 0.97, 2.4)
    assert recipe.data == load(named("b4_g16")).data, (
        "a control differs in how it updates, not in what it sees"
    )


def test_the_base_is_the_published_recipe_and_fine_tuning_begins_where_half_resolution_ends():
    recipe, half, fine = (load(named(name)) for name in ("b4_g16", "half_resolution", "finetune"))
    model = recipe.model
    data = recipe.data
    assert (model.name, model.group_size, model.expansion, model.norm_groups) == (
        "efficientnet_b4",
        16,
        4,
        4,
    )
    assert (data.mixup, data.cutmix, data.augment, data.label_smoothing) == (0.2, 0.85, "none", 0.1)
    assert (recipe.average.epoch_decay, recipe.average.step_decay) == (0.97, None)
    assert (recipe.optimizer.name, recipe.optimizer.momentum, recipe.optimizer.weight_decay) == (
        "lars",
        0.885,
        2.5e-6,
    )
    assert (recipe.schedule.warmup_epochs, recipe.run.epochs, recipe.schedule.power) == (70, 350, 2)
    assert (half.model.image_size, fine.model.image_size, fine.run.epochs) == (252, 380, 2)
    assert (fine.model.init_from, fine.model.init_weights) == (
        f"runs/{half.run.name}",
        "epoch_average",
    )

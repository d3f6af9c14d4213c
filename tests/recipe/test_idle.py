"""A key that somebody names has an effect, or is refused with the key that would give it one."""

import pytest

from common.errors import ConfigError
from recipe.idle import PREDICTED
from recipe.loading import dump, load, loads
from tests.conftest import QUICKSTART, RECIPES

CASES = [
    ("data.augmix_severity=5", "with data.augment=none; give data.augment=augmix, or remove it"),
    (
        "data.timm_randaugment=rand-m5",
        "with data.augment=none; give data.augment=timm_randaugment, or remove it",
    ),
    (
        "data.random_erasing_mode=pixel",
        "with data.random_erasing=0; give data.random_erasing=0.25, or remove it",
    ),
    (
        "data.mixing_switch=0.2",
        "data.mixing_switch has no effect with data.mixing=g16; give data.mixing=timm",
    ),
    (
        "data.mixing=timm data.mixing_switch=0.2",
        "data.mixing_switch has no effect with data.cutmix=null; give",
    ),
    (
        "data.bce_threshold=0.2",
        "data.bce_threshold has no effect with data.loss=cross_entropy; give data.loss=bce",
    ),
    (
        "data.root=/photos",
        "data.root has no effect with data.source=digits; give data.source=folder, data.source=sh",
    ),
    (
        "data.train_images=5",
        "with data.source=digits; give data.source=folder, data.source=shards, data.source=glyphs",
    ),
    ("data.dataset=CIFAR10", "with data.source=digits; give data.source=torchvision"),
    (
        "data.source=folder data.download=true",
        "with data.source=folder; give data.source=torchvision, or remove it",
    ),
    (
        "data.source=folder data.glyph_size=9",
        "with data.source=folder; give data.source=glyphs, or remove it",
    ),
    (
        "data.randaugment_magnitude=10",
        "with data.augment=none; give data.augment=randaugment, or remove it",
    ),
    (
        "data.augment=autoaugment data.randaugment_operations=3",
        "with data.augment=autoaugment; give",
    ),
    ("model.norm_momentum=0.1", "with model.norm=group; give model.norm=batch, or remove it"),
    (
        "model.proxy_eps=0.1",
        "with model.proxy_norm=false; give model.proxy_norm=true, or remove it",
    ),
    (
        "model.norm=batch model.norm_groups=7",
        "with model.norm=batch; give model.norm=group, or remove it",
    ),
    (
        "optimizer.skip=[] optimizer.skip_lr_scale=0.1",
        "with optimizer.skip=[]; give optimizer.skip=[bias, norm]",
    ),
    (
        "exchange.density=0.1",
        "with exchange.method=dense; give exchange.method=topk or gtopk, or remove it",
    ),
    (
        "exchange.local_steps=4",
        "with exchange.method=dense; give exchange.method=local, or remove it",
    ),
    (
        "exchange.method=topk exchange.compress=gradient exchange.sketch=7",
        "with exchange.compress=gradient; give",
    ),
    (
        "exchange.method=local exchange.outer_lr=0.5",
        "with exchange.outer=mean; give exchange.outer=nesterov, or",
    ),
    (
        "exchange.method=topk exchange.bits=8 exchange.wire=float16",
        "with exchange.bits=8; give exchange.bits=null, or",
    ),
]


@pytest.mark.parametrize(("overrides", "words"), CASES)
def test_a_named_key_without_effect_is_refused_with_the_remedy(overrides, words, tmp_path):
    """On the command line, and in the file that the user wrote; inherited, it may be idle."""
    with pytest.raises(ConfigError) as caught:
        load(QUICKSTART, overrides.split())
    assert str(caught.value).startswith("command line: ") and words in str(caught.value)
    sections = {}
    for override in overrides.split():
        name, _, value = override.partition("=")
        section, _, key = name.partition(".")
        sections.setdefault(section, []).append(f"{key}: {value}")
    text = "".join(f"{section}: {{{', '.join(keys)}}}\n" for section, keys in sections.items())
    own = tmp_path / "own.yaml"
    derived = tmp_path / "derived.yaml"
    own.write_text(f"extends: {QUICKSTART}\n{text}")
    derived.write_text("extends: own.yaml\n")
    inherited = load(derived)
    assert loads(dump(inherited), "again") == inherited
    with pytest.raises(ConfigError, match=r"own\.yaml: .* has no effect with"):
        load(own)


def test_keys_of_mixing_that_nothing_reads_are_refused(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text(f"extends: {QUICKSTART}\ndata: {{mixing: timm, mixup: 0.2}}\n")
    with pytest.raises(
        ConfigError,
        match=r"data\.mixing_probability has no effect with data\.mixup=0; give data.mixup",
    ):
        load(own, ["data.mixup=0", "data.mixing_probability=0.5"])


def test_what_is_so_anyway_may_be_written_down():
    load(QUICKSTART, ["exchange.method=auto", "exchange.order=fast"])


@pytest.mark.parametrize(
    "override",
    [
        "ipu.pod=16", "engine.compile_mode=max-autotune-no-cudagraphs", "parallel.minimum=2", "parallel.schedule=1f1b",
        "parallel.split=counted",
    ],
)  # fmt: skip
def test_what_only_other_hardware_or_topologies_read_is_never_refused(override):
    """One recipe, and one command, runs unchanged on all of them."""
    load(QUICKSTART, [override])


def test_a_choice_of_a_later_layer_may_make_keys_idle(tmp_path):
    """One override changes the images, the exchange or the device of any recipe."""
    own = tmp_path / "own.yaml"
    own.write_text(
        f"extends: {QUICKSTART}\nrun: {{device: ipu}}\nipu: {{pod: 16}}\nexchange: {{method: topk, density: 0.1}}\n"
        "data: {source: folder, root: /photos, augment: randaugment, randaugment_magnitude: 20}\n"
    )
    load(
        own, ["run.device=cpu", "data.source=glyphs", "data.augment=none", "exchange.method=dense"]
    )
    with pytest.raises(ConfigError, match=r"data\.root has no effect with data\.source=glyphs"):
        load(own, ["data.source=glyphs", "data.root=/others"])
    load(own, ["data.source=glyphs", "data.root=null"])


def test_what_a_run_resolved_and_what_a_caller_uses_is_not_refused(tmp_path):
    """config.yaml names every key, also those that its recipe inherited; plans predict methods that
    are not taken."""
    own = tmp_path / "own.yaml"
    config = tmp_path / "config.yaml"
    own.write_text(
        f"extends: {QUICKSTART}\ndata: {{augment: randaugment, randaugment_magnitude: 20}}\n"
    )
    resolved = load(own, ["data.augment=none"])
    config.write_text(dump(resolved))
    assert load(config) == resolved == loads(dump(resolved), "there")
    assert load(QUICKSTART, ["exchange.density=0.1"], used=PREDICTED).exchange.density == 0.1


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_no_recipe_that_comes_along_names_such_a_key(path):
    load(path)

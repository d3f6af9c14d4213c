"""Words of other programs lead to keys that exist, and that docs/coming_from.md names for them."""

import re

import pytest

import train
from common.errors import ConfigError
from recipe import loading, suggestions
from recipe.config import SECTIONS
from recipe.foreign_words import KEYS
from tests.conftest import QUICKSTART, ROOT

ALL_KEYS = {f"{name}.{key}" for name, section in SECTIONS.items() for key in section.fields()}
PAGE = "docs/coming_from.md translates words of other programs"


def rows():
    """Return words of timm, Lightning and torchtitan, and the keys beside them, of each row of the
    page's table."""
    for line in (ROOT / "docs" / "coming_from.md").read_text().splitlines():
        cells = re.split(r"\s*\|\s*", line.strip("|"))
        if len(cells) != 5:
            continue
        words = re.findall(r"(?:--|`|\.)([a-z][a-z_-]+)(?:=| |`)", " ".join(cells[1:4]))
        keys = ALL_KEYS.intersection(re.findall(r"([a-z]+\.[a-z_]+)", cells[4]))
        yield [word.replace("-", "_") for word in words], keys


def test_all_keys_exist():
    assert {key for meant in KEYS.values() for key in meant} <= ALL_KEYS


def test_translations_are_those_of_the_page():
    found = [(word, keys) for words, keys in rows() for word in words if word in KEYS and keys]
    assert len(found) > 25
    for word, keys in found:
        assert keys.intersection(KEYS[word]), (word, keys)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("lr=0.1", f"did you mean schedule.peak=...? {PAGE}"),
        ("batch_size=64", f"did you mean batch.global=... or batch.micro=...? {PAGE}"),
        ("reprob=0.25", f"did you mean data.random_erasing=...? {PAGE}"),
        ("aa=rand-m9", f"did you mean data.augment=...? {PAGE}"),
        ("sampler=balanced", f"did you mean data.balance=...? {PAGE}"),
        ("precision=16-mixed", f"did you mean precision.compute=...? {PAGE}"),
        ("model=efficientnet_b0", "did you mean model.name=efficientnet_b0?"),
        ("epochs=3", "did you mean run.epochs=3?"),
        ("optimizer.lr=0.1", "optimizer.lr: unknown key; did you mean schedule.peak?"),
        ("data.crop_pct=0.9", "data.crop_pct: unknown key; did you mean data.crop_fraction?"),
        (
            "data.batch_size=9",
            "data.batch_size: unknown key; did you mean batch.global or batch.micro?",
        ),
        ("precision.amp=true", "precision.amp: unknown key; did you mean precision.compute?"),
        ("model.drop=0.1", "model.drop: unknown key; did you mean model.dropout?"),
    ],
)
def test_overrides_in_words_of_others_lead_to_the_key(override, said):
    with pytest.raises(ConfigError) as refusal:
        loading.load(QUICKSTART, [override])
    assert str(refusal.value).endswith(said)


def test_keys_of_other_sections_are_only_proposed_where_they_are_close():
    """`data.erase` is no `log.trace`: the keys that there are say more."""
    assert suggestions.for_unknown("data", "erase").startswith("; data has source, reader, ")
    assert suggestions.for_unknown("data", "profil") == "; did you mean log.profile or ipu.profile?"


@pytest.mark.parametrize(
    ("word", "key"), [("--lr=0.1", "schedule.peak"), ("--batch-size", "batch.global")]
)
def test_flags_of_others_lead_to_the_key(word, key, capsys):
    with pytest.raises(SystemExit) as exit:
        train.main(["--config", str(QUICKSTART), word])
    line = capsys.readouterr().err
    assert (
        exit.value.code == 2 and f"unrecognized arguments: {word}; did you mean {key}=..." in line
    )
    assert line.count("\n") == 1

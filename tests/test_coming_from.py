"""Commands of timm's documentation, as docs/coming_from.md translates them, are accepted whole."""

import re
import shlex

import pytest
import timm

import train
from recipe import loading
from tests.conftest import ROOT

SECTION = "## The training commands of timm's documentation"


def commands():
    page = (ROOT / "docs" / "coming_from.md").read_text()
    section = page[page.index(SECTION) :].split("\n## ")[0]
    for block in re.findall(r"```bash\n(.*?)```", section, re.DOTALL):
        yield shlex.split(block.replace("\\\n", " "))


COMMANDS = list(commands())


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[4].partition("=")[2])
def test_a_translated_command_has_a_plan(words, capsys, tmp_path):
    assert words[:2] == ["python", "train.py"]
    options = [*words[2:], "data.root=/imagenet", f"run.output={tmp_path / 'run'}"]
    assert train.main([*options, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "is unusual for" not in plan and "1281167 training images" in plan
    recipe = loading.load(ROOT / "configs" / "timm.yaml", options[2:])
    assert recipe.model.architecture == words[4].partition("=")[2]
    # Evaluation shows what timm's configuration of the model says.
    known = timm.get_pretrained_cfg(recipe.model.architecture)
    shown = (recipe.data.interpolation, recipe.data.crop_fraction, recipe.data.crop_rounding)
    assert shown == (known.interpolation, known.crop_pct, "down")


def test_eight_of_the_ten_are_translated_and_two_are_named():
    assert len(COMMANDS) == 8
    section = (ROOT / "docs" / "coming_from.md").read_text().split(SECTION)[1]
    assert "--jsd" in section and "--task multilabel" in section

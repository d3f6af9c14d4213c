"""python -m tools.plan: the plan of --dry-run, as text and as one JSON object; and the table in docs/ipu.md."""

import json
import subprocess
import sys

import pytest
from PIL import Image

import train
from recipe import ipu, ipu_plan
from recipe.batch import divide
from recipe.loading import load
from tests.conftest import QUICKSTART, RECIPES, ROOT
from tools import plan
from tools.planning import machine

POD256 = ROOT / "configs" / "pod256.yaml"
TRUST = "optimizer.trust=momentum"
FULL_POD = (TRUST, "parallel.replicas=128")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    monkeypatch.delenv("POPDIST_NUM_IPUS_PER_REPLICA", raising=False)


def printed(capsys, *arguments):
    assert plan.main(list(arguments)) == 0
    return capsys.readouterr().out


def test_the_text_begins_with_that_of_a_dry_run(capsys):
    assert train.main(["--config", str(POD256), "--dry-run", *FULL_POD]) == 0
    expected = capsys.readouterr().out
    text = printed(capsys, "--config", str(POD256), *FULL_POD)
    assert text.startswith(expected)
    assert text[len(expected) :].startswith("machine    Bow Pod; ")


def test_the_page_about_planning_shows_this_plan(capsys):
    text = printed(capsys, "--config", str(POD256), *FULL_POD)
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    assert text[text.index("machine  ") :] in page


@pytest.mark.parametrize("config", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_be_planned_for_every_machine(config, capsys):
    """All parts of a step add up, and JSON holds what the text says."""
    for name in machine.names():
        text = printed(capsys, "--config", str(config), "--machine", name, "--json")
        data = json.loads(text.splitlines()[-1])
        assert data["machine"]["name"] == machine.load(name).name
        assert [row["replicas"] for row in data["scaling"]] == [2**power for power in range(13)]
        for row in (data["step"], *data["scaling"]):
            assert sum(row["parts"].values()) == pytest.approx(row["seconds"])
        assert f"{data['model']['parameters']:,} parameters" in text
        rate = data["step"]["images_per_second"]
        assert (f"{rate:,.0f} images/s" if rate >= 10 else f"{rate:.2g} images/s") in text


def test_hours_are_those_of_all_updates(capsys):
    """350 epochs of 208 updates, as the dry run says."""
    last = printed(capsys, "--json", "--config", str(POD256), *FULL_POD).splitlines()[-1]
    step = json.loads(last)["step"]
    assert step["hours"] == pytest.approx(350 * 208 * step["seconds"] / 3600)


def test_a_plan_needs_no_torch():
    code = "import sys\nfrom tools import plan\nplan.main(sys.argv[1:])\nassert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "--config", str(POD256), *FULL_POD]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def test_a_reader_that_goes_away_is_no_fault():
    command = f"{sys.executable} -m tools.plan --config {POD256} --json | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_that_a_machine_was_guessed_is_said(capsys):
    assert "others by --machine bow_pod, " in printed(capsys, "--config", str(QUICKSTART))
    assert "others by" not in printed(capsys, "--config", str(QUICKSTART), "--machine", "dgx_a100")


def test_missing_times_are_explained(capsys):
    assert "no time: so large a batch" in printed(capsys, "--config", str(QUICKSTART))
    unknown = ("--config", str(ROOT / "configs" / "gpu.yaml"), "data.train_images=null")
    assert "no time: the number of images is known once" in printed(capsys, *unknown)


def test_what_does_not_fit_is_said(capsys):
    fits = printed(capsys, "--config", str(POD256), *FULL_POD)
    assert "DOES NOT FIT" not in fits
    assert "DOES NOT FIT" in printed(capsys, "--config", str(POD256), *FULL_POD, "model.width=5")


def test_a_picture_is_drawn(capsys, tmp_path):
    path = tmp_path / "scaling.png"
    text = printed(capsys, "--config", str(POD256), "--picture", str(path), *FULL_POD)
    assert f"picture    {path}\n" in text
    with Image.open(path) as picture:
        assert picture.size == (990, 770)


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["--machine", "cray"], 2, "cray: no machine; name a file that python -m tools.doctor has written, or one of"),
        (["--picture", "scaling.doc"], 2, "scaling.doc: no kind of picture; name it like scaling.png"),
        (
            ["--picture", "/nowhere/scaling.png"],
            1,
            "/nowhere/scaling.png: No such file or directory; fix this, then rerun",
        ),
        (["parallel.split=[blocks.9.9]"], 2, f"{POD256}: parallel.split: blocks.9.9 is not a block; the blocks are"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, code, line, capsys):
    assert plan.main(["--config", str(POD256), *FULL_POD, *arguments]) == code
    complaint = capsys.readouterr().err
    assert complaint.startswith(line)
    assert complaint.count("\n") == 1


def test_the_plan_lists_every_option_and_where_it_comes_from(capsys):
    text = printed(capsys, "--config", str(POD256), *FULL_POD)
    recipe = load(POD256, FULL_POD)
    batch = divide(recipe)
    for model, make in (("training", ipu.training_settings), ("evaluation", ipu.evaluation_settings)):
        for setting in make(recipe, batch, 128, under_poprun=False):
            assert f"{model:<10} {setting}  <- {setting.source}\n" in text
    assert "training   Options.Training.gradientAccumulation(16)  <- batch.global, batch.micro" in text
    assert "optimizer  poptorch.optim.LAMB(betas=(0.885, 1.0))  <- optimizer.momentum" in text
    assert "note       pipelined stages: 3 micro batches are prefetched, but I/O does not overlap" in text


def test_the_last_line_is_one_json_object(capsys):
    last = printed(capsys, "--json", "--config", str(POD256), *FULL_POD).splitlines()[-1]
    data = json.loads(last)
    assert data["batch"] == {"global": 6144, "micro": 3, "accumulation": 16, "replicas": 128, "stages": 2}
    assert {tuple(option) for option in data["options"]} == {("model", "call", "arguments", "from")}
    found = {(option["model"], option["call"]): option["arguments"] for option in data["options"]}
    assert found["training", "Options.setExecutionStrategy"] == ["poptorch.PipelinedExecution()"]
    assert found["training", "Options.Precision.setPartialsType"] == ["torch.half"]
    assert found["evaluation", "Options.deviceIterations"] == [8]
    assert data["optimizer"]["name"] == "poptorch.optim.LAMB"
    assert data["optimizer"]["options"]["betas"] == [0.885, 1.0]
    assert [group["skipped"] for group in data["optimizer"]["groups"]] == [False, True]
    assert set(data["optimizer"]["from"]) == {"lr", *data["optimizer"]["options"]}


@pytest.mark.parametrize("name", ["lars", "lamb", "sgd", "rmsprop"])
def test_every_argument_of_every_optimizer_has_a_source(name):
    overrides = [f"optimizer.name={name}", *([TRUST] if name == "lars" else [])]
    recipe = load(QUICKSTART, ["run.device=ipu", *overrides])
    keys = recipe.model_dump(by_alias=True)
    for argument, _, source in ipu_plan.arguments_of_optimizer(recipe):
        for part in source.split("; "):
            if part.startswith("always: "):
                continue
            for key in part.split(", "):
                section, _, inner = key.partition(".")
                assert section in keys and (not inner or keys[section][inner] is not None), (argument, source)


def test_under_poprun_the_replicas_are_its_own(capsys, monkeypatch):
    assert "Options.replicationFactor(128)" in printed(capsys, "--config", str(POD256), *FULL_POD)
    monkeypatch.setenv("POPDIST_NUM_IPUS_PER_REPLICA", "2")
    assert "replicationFactor" not in printed(capsys, "--config", str(POD256), *FULL_POD)


def test_other_devices_have_no_options(capsys):
    text = printed(capsys, "--json", "--config", str(QUICKSTART))
    assert "poptorch" not in text
    data = json.loads(text.splitlines()[-1])
    assert data["options"] == [] and data["optimizer"] == {} and data["batch"]["global"] == 64


def test_a_wrong_recipe_is_one_line_and_2(capsys):
    assert plan.main(["--config", str(POD256), "optimizer.trust=gradient"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(str(POD256)) and "use optimizer.trust=momentum" in line


def table():
    """The rows of docs/ipu.md's table, made from the plan of a POD256."""
    recipe = load(POD256, FULL_POD)
    rows: dict = {}
    for model, setting in ipu_plan.settings(recipe, divide(recipe)):
        rows.setdefault((f"`{setting}`", setting.source), []).append(model)
    for argument, value, source in ipu_plan.arguments_of_optimizer(recipe):
        rows[f"`{ipu.optimizer(recipe).name}(..., {argument}={value})`", source] = ["optimizer"]
    for which, how, source in ipu_plan.groups_of_optimizer(recipe):
        rows[f"{which} parameters: {how}", source] = ["optimizer"]
    return [f"| {source} | {call} | {', '.join(models)} |" for (call, source), models in rows.items()]


def test_the_table_in_the_docs_is_the_plan_of_a_pod256():
    lines = (ROOT / "docs" / "ipu.md").read_text().splitlines()
    start = lines.index("| recipe key | PopTorch call | of |") + 2
    end = next(number for number in range(start, len(lines)) if not lines[number].startswith("|"))
    assert lines[start:end] == table(), "replace the rows in docs/ipu.md by:\n" + "\n".join(table())

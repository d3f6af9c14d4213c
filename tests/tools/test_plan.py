"""python -m tools.plan: the plan of --dry-run, as text and as one JSON object; and the table in
docs/ipu.md."""

import itertools
import json
import os
import subprocess
import sys

import pytest

import train
from recipe.batch import divide
from recipe.ipu import optimizers
from recipe.ipu import plan as ipu_plan
from recipe.loading import load
from tests.conftest import QUICKSTART, RECIPES, ROOT
from tools import plan
from tools.formats import number
from tools.planning import machine

POD256, GPU = (ROOT / "configs" / name for name in ("pod256.yaml", "gpu.yaml"))
TRUST = "optimizer.trust=momentum"
FULL_POD = (TRUST, "parallel.replicas=128")


@pytest.fixture
def planned(call):
    """planned(config, *arguments): the text of a plan."""

    def printed(config, *arguments):
        code, lines, _ = call(plan.main, "--config", config, *arguments)
        assert code == 0
        return "\n".join(lines) + "\n"

    return printed


def test_the_text_is_that_of_a_dry_run_and_of_the_page_and_the_json_has_its_figures(planned, call):
    text, _, data = planned(POD256, "--json", *FULL_POD).rstrip().rpartition("\n")
    text = text + "\n"
    data = json.loads(data)
    dry_run = "\n".join(call(train.main, "--config", POD256, "--dry-run", *FULL_POD)[1]) + "\n"
    assert text.startswith(f"{dry_run}machine    Bow Pod; ")
    assert text.removeprefix(dry_run) in (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    assert (
        "training   Options.Training.gradientAccumulation(16)  <- batch.global, batch.micro" in text
    )
    assert "optimizer  poptorch.optim.LAMB(betas=(0.885, 1.0))  <- optimizer.momentum" in text
    sizes = {"global": 6144, "micro": 3, "accumulation": 16, "replicas": 128, "stages": 2}
    assert data["batch"] == {**sizes, "uneven": []}
    assert {tuple(option) for option in data["options"]} == {("model", "call", "arguments", "from")}
    found = {(option["model"], option["call"]): option["arguments"] for option in data["options"]}
    assert found["training", "Options.setExecutionStrategy"] == ["poptorch.PipelinedExecution()"]
    assert found["evaluation", "Options.deviceIterations"] == [8]
    assert data["optimizer"]["name"] == "poptorch.optim.LAMB"
    assert [group["skipped"] for group in data["optimizer"]["groups"]] == [False, True]
    assert set(data["optimizer"]["from"]) == {"lr", *data["optimizer"]["options"]}
    # 350 epochs of 208 updates, as the dry run says.
    assert data["step"]["hours"] == pytest.approx(350 * 208 * data["step"]["seconds"] / 3600)


def test_the_page_has_the_plan_of_a_host_of_eight_gpus(planned):
    words = ("parallel.replicas=8", "batch.micro=128", "precision.compute=bfloat16")
    text = planned(GPU, "--machine", "h200", *words)
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    assert text[text.index("machine    HGX H200") :] in page
    assert f"--config configs/gpu.yaml --machine h200 {' '.join(words)}\n" in page


def recipes_and_machines():
    """Each recipe with all machines; all but one of them are slow."""
    names = machine.names()
    for place, (config, name) in enumerate(itertools.product(RECIPES, names)):
        fast = place // len(names) % len(names) == place % len(names)
        yield pytest.param(
            config, name, id=f"{config.stem}-{name}", marks=() if fast else pytest.mark.slow
        )


@pytest.mark.parametrize(("config", "name"), list(recipes_and_machines()))
def test_every_recipe_can_be_planned_for_every_machine(config, name, planned):
    """All parts of a step add up, and JSON holds the figures of the text."""
    text = planned(config, "--machine", name, "--json")
    data = json.loads(text.splitlines()[-1])
    assert data["machine"]["name"] == machine.load(name).name
    assert [row["replicas"] for row in data["scaling"]] == [2**power for power in range(13)]
    for row in (data["step"], *data["scaling"]):
        assert (
            sum(row["parts"].values()) == pytest.approx(row["seconds"])
            and min(row["parts"].values()) >= 0
        )
        assert row["images_per_second"] == pytest.approx(row["global_batch"] / row["seconds"])
    assert f"{data['model']['parameters']:,} parameters" in text
    assert f"{number(data['step']['images_per_second'])} images/s" in text
    assert bool(data["options"]) == bool(data["optimizer"]) == (load(config).run.device == "ipu")


@pytest.mark.parametrize(
    ("arguments", "words", "others"),
    [
        (
            [QUICKSTART],
            ["others by --machine bow_pod, ", "no time: the number of images"],
            ["poptorch"],
        ),
        (
            [GPU],
            ["A100", "assumed, as two cores would train for 1", "others by --machine"],
            ["images/s, 17,"],
        ),
        ([GPU, "run.device=cpu"], ["two cores"], ["assumed", "others by"]),
        ([GPU, "data.train_images=null"], ["no time: the number of images"], []),
        ([POD256, *FULL_POD, "model.width=5"], ["DOES NOT FIT"], []),
    ],
)
def test_notes_are_printed_where_they_apply(arguments, words, others, planned):
    text = planned(*arguments)
    assert (
        [word for word in words if word not in text]
        == []
        == [word for word in others if word in text]
    )


def test_images_that_are_found_here_give_the_time(planned, tmp_path):
    for split, number_of in (("train", 8), ("val", 2)):
        for name in range(number_of):
            image = tmp_path / split / "ab"[name % 2] / f"{name}.jpg"
            image.parent.mkdir(parents=True, exist_ok=True)
            image.touch()
    folder = (
        "data.source=folder",
        f"data.root={tmp_path}",
        "model.classes=2",
        "schedule.warmup_epochs=0",
    )
    steps = 10**11  # too many for two cores
    text = planned(
        QUICKSTART, "--json", *folder, "batch.global=4", "batch.micro=2", f"run.steps={steps}"
    )
    assert "8 training images" in text and "assumed, as two cores would train for" in text
    step = json.loads(text.splitlines()[-1])["step"]
    assert step["hours"] == pytest.approx(steps * step["seconds"] / 3600)


def test_a_picture_is_drawn_and_no_torch_is_loaded(tmp_path):
    path = tmp_path / "scaling.png"
    path.write_text("old")
    os.link(path, tmp_path / "old")
    code = "import sys\nfrom tools import plan\nplan.main(sys.argv[1:])\nassert 'torch' not in sys.modules"
    command = [
        sys.executable,
        "-c",
        code,
        "--config",
        str(POD256),
        "--picture",
        str(path),
        *FULL_POD,
    ]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert f"picture    {path}\n" in done.stdout and path.read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "old").read_text() == "old", "who has the old picture open keeps it"


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (
            ["--machine", "cray"],
            2,
            "cray: unknown machine: No such file or directory; name a file written by python -m tools.doctor",
        ),
        (
            ["--picture", "scaling.doc"],
            2,
            "scaling.doc: no kind of picture; name it like scaling.png",
        ),
        (
            ["--picture", "/nowhere/scaling.png"],
            1,
            "/nowhere/scaling.png: No such file or directory; fix this",
        ),
        (
            ["parallel.split=[blocks.9.9]"],
            2,
            f"{POD256}: parallel.split: blocks.9.9 is not a block; the blocks are",
        ),
        (["optimizer.trust=gradient"], 2, f"{POD256}: "),
    ],
)
def test_faults_are_one_line(arguments, code, line, call):
    found, _, (complaint,) = call(plan.main, "--config", POD256, *FULL_POD, *arguments)
    assert found == code and complaint.startswith(line)


@pytest.mark.parametrize("name", ["lars", "lamb", "sgd", "rmsprop"])
def test_every_argument_of_every_optimizer_has_a_source(name):
    recipe = load(
        QUICKSTART,
        ["run.device=ipu", f"optimizer.name={name}", *([TRUST] if name == "lars" else [])],
    )
    keys = recipe.model_dump(by_alias=True)
    for argument, _, source in ipu_plan.arguments_of_optimizer(recipe):
        for key in (
            key
            for part in source.split("; ")
            if not part.startswith("always: ")
            for key in part.split(", ")
        ):
            section, _, inner = key.partition(".")
            assert section in keys and (not inner or keys[section][inner] is not None), (
                argument,
                source,
            )


def test_under_poprun_the_replicas_are_its_own(planned, monkeypatch):
    assert "Options.replicationFactor(128)" in planned(POD256, *FULL_POD)
    monkeypatch.setenv("POPDIST_NUM_IPUS_PER_REPLICA", "2")
    assert "replicationFactor" not in planned(POD256, *FULL_POD)


def table():
    """The rows of docs/ipu.md's table, made from the plan of a POD256."""
    recipe = load(POD256, FULL_POD)
    rows: dict = {}
    for model, setting in ipu_plan.settings(recipe, divide(recipe)):
        rows.setdefault((f"`{setting}`", setting.source), []).append(model)
    for argument, value, source in ipu_plan.arguments_of_optimizer(recipe):
        rows[f"`{optimizers.optimizer(recipe).name}(..., {argument}={value})`", source] = [
            "optimizer"
        ]
    for which, how, source in ipu_plan.groups_of_optimizer(recipe):
        rows[f"{which} parameters: {how}", source] = ["optimizer"]
    return [
        f"| {source} | {call} | {', '.join(models)} |" for (call, source), models in rows.items()
    ]


def test_the_table_in_the_docs_is_the_plan_of_a_pod256():
    lines = (ROOT / "docs" / "ipu.md").read_text().splitlines()
    start = lines.index("| recipe key | PopTorch call | of |") + 2
    end = next(number for number in range(start, len(lines)) if not lines[number].startswith("|"))
    assert lines[start:end] == table(), "replace the rows in docs/ipu.md by:\n" + "\n".join(table())

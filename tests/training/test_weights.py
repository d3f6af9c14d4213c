"""Weights from every kind of file, under our names or timm's, and refusals that name file, tensor
and remedy."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch

from common.errors import CheckpointError
from recipe.config import Model
from training.checkpoint import CheckpointFolder
from training.weights import StoredWeights, fitted, opened, read, run_folder_of

BUFFER = "blocks.0.0.bn1.running_mean"
MODEL = {"stem.conv_stem.weight": (2, 3), BUFFER: (2,), "head.classifier.weight": (10, 2)}


def tensors(shapes=None, value=1.0):
    return {name: torch.full(shape, value) for name, shape in (shapes or MODEL).items()}


# By step; the second step has an epoch average, too.
TOP1 = {
    1: {"trained": 0.6, "step_average": 0.9},
    2: {"trained": 0.7, "step_average": 0.5, "epoch_average": 0.8},
}


def foreign(value):
    """Weights under timm's names."""
    return tensors({"conv_stem.weight": (2, 3), "classifier.weight": (10, 2)}, value)


def state(value, **more):
    """Weights and buffers of an engine or of an average."""
    values = tensors(value=value)
    return {"buffers": {BUFFER: values.pop(BUFFER)}, "weights": values, **more}


@pytest.fixture
def run(tmp_path):
    """A run folder with checkpoints of steps 1 and 2; weights are the step, averages ten and twenty
    times that."""
    folder = tmp_path / "run"
    folder.mkdir()
    checkpoints = CheckpointFolder(folder / "checkpoints", 2, True)
    for step, (trained, *averages) in ((step, TOP1[step].values()) for step in TOP1):
        kinds = {"step_average": (10.0 * step, 3), "epoch_average": (20.0 * step, step - 1)}
        engine = state(
            float(step),
            averages={name: state(v, count=torch.tensor(n)) for name, (v, n) in kinds.items()},
        )
        scores = {"top1": trained, **{name: {"top1": top1} for name, top1 in zip(kinds, averages)}}
        content = {"recipe": "run: {steps: 2}", "engine": engine, "classes": ["a", "b"]}
        content["progression"] = {"step": step, "scores": scores}
        checkpoints.save(step, content, top1=max(trained, *averages))
    (folder / "config.yaml").write_text("run: {steps: 2}")
    return folder


def test_a_run_folder_gives_its_newest_checkpoint_or_the_one_that_is_named(run, monkeypatch):
    stored = read(str(run))
    assert stored.path == run / "checkpoints" / "step-00000002.pt"
    assert (stored.recipe, stored.classes, stored.which) == (
        "run: {steps: 2}",
        ["a", "b"],
        "trained",
    )
    assert {
        name: tensor.flatten()[0].item() for name, tensor in stored.tensors.items()
    } == dict.fromkeys(MODEL, 2.0)
    first = str(run / "checkpoints" / "step-00000001.pt")
    for path, which, value in (
        (first, "step_average", 10.0),
        (run, "epoch_average", 40.0),
        (first, None, 1.0),
    ):
        found = read(str(path), which)
        assert (found.which, found.tensors[BUFFER].tolist()) == (which or "trained", [value] * 2)
    with pytest.raises(
        CheckpointError,
        match=r"step-00000001\.pt: has no epoch_average; it has trained, step_average",
    ):
        read(first, "epoch_average")
    assert run_folder_of(stored.path) == run == run_folder_of(run / "export" / "any.onnx")
    assert run_folder_of(run / "evaluation" / "any.onnx") is None
    for inside in ("checkpoints", "export"):
        (run / inside).mkdir(exist_ok=True)
        monkeypatch.chdir(run / inside)
        assert run_folder_of(Path("any.pt")) == run
    monkeypatch.chdir(run)
    assert run_folder_of(Path("checkpoints/any.pt")) == run
    (run / "config.yaml").unlink()
    assert run_folder_of(stored.path) is None


def test_a_checkpoint_that_is_named_is_compared_with_the_manifest_beside_it(run, tmp_path, capsys):
    """A file by itself has nothing to be compared with; that a manifest is damaged is said."""
    path = run / "checkpoints" / "step-00000002.pt"
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0")
    with pytest.raises(
        CheckpointError,
        match=r"step-00000002\.pt: damaged: .* do not match the manifest's checksum",
    ):
        read(str(path))
    path.write_bytes(whole)
    manifest = path.with_suffix(".json")
    manifest.write_text(manifest.read_text().replace("0.8", "0.9"))
    assert read(str(path)).tensors["stem.conv_stem.weight"][0, 0] == 2.0
    assert capsys.readouterr().out.startswith(
        f"{manifest}: damaged: it does not match its own checksum; "
    )
    assert read(str(run), best=True).path.name == "step-00000001.pt"
    assert capsys.readouterr().out.startswith(
        f"{manifest}: damaged: it does not match its own checksum; "
    )
    alone = tmp_path / path.name
    alone.write_bytes(whole)
    assert (
        read(str(alone)).tensors["stem.conv_stem.weight"][0, 0] == 2.0
        and not capsys.readouterr().out
    )


def test_the_best_checkpoint_gives_the_weights_that_scored_best_or_the_next_best_where_it_is_damaged(
    run, tmp_path, capsys
):
    """An average of step 1 is the best; of the trained weights by themselves step 1's are asked for
    as well."""
    best = read(str(run), best=True)
    assert (best.path.name, best.which) == ("step-00000001.pt", "step_average")
    assert best.tensors["stem.conv_stem.weight"][0, 0] == 10.0
    assert read(str(run), "trained", best=True).tensors["stem.conv_stem.weight"][0, 0] == 1.0
    with pytest.raises(CheckpointError, match="the best checkpoint is chosen in a run folder"):
        read(str(best.path), best=True)
    best.path.write_bytes(best.path.read_bytes()[:-1])
    assert read(str(run), best=True).path.name == "step-00000002.pt"
    assert "step-00000001.pt: damaged" in capsys.readouterr().out
    CheckpointFolder(tmp_path / "checkpoints", 2, True).save(
        1, {"progression": {"step": 1}}, top1=None
    )
    with pytest.raises(CheckpointError, match="no scored checkpoint in this folder"):
        read(str(tmp_path), best=True)


def test_state_dicts_of_others_are_found_where_their_scripts_put_them(tmp_path):
    path = tmp_path / "w.pth"
    for prefix in ("", "module."):
        own = {prefix + name: tensor for name, tensor in tensors().items()}
        for content in (own, {"state_dict": own, "epoch": 3}, {"model": own}):
            torch.save(content, path)
            stored = read(str(path))
            assert (
                set(stored.tensors) == set(MODEL)
                and stored.recipe is None
                and stored.classes is None
            )
    with pytest.raises(
        CheckpointError, match="has no step_average, its weights are trained; ask for trained"
    ):
        read(str(path), "step_average")


def test_safetensors_carry_recipe_classes_and_which_weights_they_are_if_they_were_written_so(
    tmp_path,
):
    plain = str(tmp_path / "plain.safetensors")
    full = str(tmp_path / "full.safetensors")
    about = {
        "recipe": "run: {steps: 2}",
        "classes": json.dumps(["a", "b"]),
        "weights": "step_average",
    }
    safetensors.torch.save_file(tensors(), plain)
    safetensors.torch.save_file(tensors(), full, about)
    assert read(plain)[2:5] == (None, None, "trained")
    assert (
        read(full)[2:5]
        == read(full, "step_average")[2:5]
        == ("run: {steps: 2}", ["a", "b"], "step_average")
    )
    assert set(read(full).tensors) == set(MODEL)
    for path, average in ((full, "epoch_average"), (plain, "step_average")):
        with pytest.raises(CheckpointError, match=f"has no {average}"):
            read(path, average)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "none.pt",
            None,
            "no such file or folder; name a run folder, a checkpoint or a weights file",
        ),
        ("folder", Path.mkdir, "no checkpoint in this folder"),
        ("text.safetensors", b"hello", "not a whole"),
        (
            "text.pth",
            b"hello",
            "not weights: neither a checkpoint of this program nor a state dict",
        ),
        *(("w.pt", content, "not weights") for content in ({}, {"a": 1}, [torch.zeros(2)])),
    ],
)
def test_what_holds_no_weights_is_refused_by_name(tmp_path, name, content, words):
    path = tmp_path / name
    if callable(content):
        content(path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(CheckpointError) as refusal:
        read(str(path))
    assert str(refusal.value).startswith(f"{path}: {words}")


@pytest.mark.parametrize(
    ("change", "new_classifier", "words"),
    [
        (
            {"stem.conv_stem.weight": (3, 3)},
            True,
            r"stem.conv_stem.weight is \[3, 3\], the model's is \[2, 3\]",
        ),
        ({"extra.weight": (1,)}, True, "extra.weight has no place in the model of the recipe"),
        ({"stem.conv_stem.weight": None}, True, "stem.conv_stem.weight is missing"),
        (
            {"head.classifier.weight": (7, 2)},
            False,
            r"\[7, 2\], the model's is \[10, 2\]; set model.classes=7",
        ),
        ({"head.classifier.weight": (7, 2)}, True, None),
    ],
)
def test_weights_of_another_model_are_refused_but_for_the_classifier_where_that_is_wanted(
    tmp_path, change, new_classifier, words
):
    torch.save(
        tensors({name: shape for name, shape in {**MODEL, **change}.items() if shape}),
        tmp_path / "w.pt",
    )
    stored = read(str(tmp_path / "w.pt"))
    if words is None:
        found, fresh = fitted(stored, MODEL, Model(), new_classifier)
        assert fresh == ["head.classifier.weight"] and set(found) == set(MODEL) - set(fresh)
    else:
        with pytest.raises(CheckpointError, match=words):
            fitted(stored, MODEL, Model(), new_classifier)


def test_a_classifier_that_is_a_single_number_is_refused_as_any_other_shape():
    stored = StoredWeights(Path("w.pt"), {**tensors(), "head.classifier.weight": torch.tensor(1.0)})
    with pytest.raises(
        CheckpointError,
        match=r"classifier.weight is \[\], the model's is \[10, 2\]; name weights of",
    ):
        fitted(stored, MODEL, Model(), new_classifier=False)


def test_a_stem_that_is_a_single_number_is_refused_as_any_other_shape():
    """The blocks are those of an EfficientNet, whose width the stem would tell."""
    shapes = {"blocks.1.0.conv_pw.weight": (8, 4, 1, 1), "blocks.1.0.conv_dw.weight": (8, 1, 3, 3)}
    stored = StoredWeights(
        Path("w.pt"), {**tensors(shapes), "stem.conv_stem.weight": torch.tensor(1.0)}
    )
    with pytest.raises(
        CheckpointError, match=r"blocks.1.0.conv_pw.weight, .* have no place in the model"
    ):
        fitted(stored, MODEL, Model(), new_classifier=False)


def test_the_remedy_for_a_timm_model_names_the_keys_that_differ(tiny):
    stored = StoredWeights(
        Path("b0.pth"), timm.create_model("tf_efficientnet_b0", num_classes=10).state_dict()
    )
    remedy = (
        "set model.width=1.0 model.depth=1.0 model.group_size=1 model.expansion=6 model.norm=batch"
    )
    with pytest.raises(CheckpointError, match=remedy):
        fitted(stored, MODEL, tiny().model, False)


def test_the_folder_of_the_checkpoints_is_as_good_as_that_of_the_run(run, tmp_path):
    own = run / "checkpoints"
    assert read(str(own)).path == own / "step-00000002.pt"
    copied = own.rename(tmp_path / "copied")
    assert read(str(copied)).path == copied / "step-00000002.pt"
    assert read(str(copied), best=True).path == copied / "step-00000001.pt"


@pytest.mark.parametrize("which", [None, "ema"])
def test_averages_in_a_file_of_a_model_of_timm_are_those_that_the_recipe_names(tmp_path, which):
    path = tmp_path / "w.pth"
    torch.save({"state_dict": foreign(1.0), "state_dict_ema": foreign(2.0)}, path)
    name = f"timm:efficientnet_b0:{path}"
    stored, recipe = opened(
        name, which, False, None, ["data.root=/photos", "model.init_weights=ema"]
    )
    assert (stored.which, recipe.model.init_weights) == ("ema", "ema")
    assert {tensor.flatten()[0].item() for tensor in stored.tensors.values()} == {2.0}
    assert any("images as timm's efficientnet_b0: " in note for note in stored.notes)
    stored, _ = opened(name, which, False, None, ["data.root=/photos"])
    assert stored.which == (which or "trained")


def test_what_timm_downloads_has_no_average_and_no_best_checkpoint(monkeypatch):
    monkeypatch.setattr(timm, "create_model", None)
    with pytest.raises(
        CheckpointError,
        match=r"^timm:resnet18: has no ema, its weights are trained; ask for trained$",
    ):
        read("timm:resnet18", "ema")
    with pytest.raises(
        CheckpointError, match=r"^timm:resnet18: the best checkpoint is chosen in a run folder"
    ):
        read("timm:resnet18", best=True)


def test_what_cannot_be_downloaded_asks_for_a_file(monkeypatch):
    def refused(name, pretrained):
        raise RuntimeError("no route to host")

    monkeypatch.setattr(timm, "create_model", refused)
    with pytest.raises(
        CheckpointError, match=r"no route to host.*model.init_from=timm:tf_efficientnet_b0:FILE"
    ):
        read("timm:tf_efficientnet_b0")

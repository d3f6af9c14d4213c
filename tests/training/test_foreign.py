"""Weights in files as other programs write them, compared with timm's own reader and with what went
into the files."""

import argparse
import collections
import datetime
import pathlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from timm.models._efficientnet_builder import decode_arch_def
from timm.models.efficientnet import EfficientNet
from torch import nn
from torch.optim.swa_utils import AveragedModel

from common.errors import CheckpointError
from recipe.config import Model
from tests.conftest import ROOT
from tests.tensors import assert_bitwise_equal
from training import unpickling, weights
from training.weights import StoredWeights, fitted, opened, read

NAMESPACE = argparse.Namespace(model="efficientnet_b0", lr=0.1, output=pathlib.Path("x"))
KEEPS_SETTINGS_OUT = hasattr(torch.serialization, "safe_globals")
newer_torch = pytest.mark.skipif(not KEEPS_SETTINGS_OUT, reason="torch 2.0.1 has no safe_globals")


def network(seed):
    """A very small EfficientNet of timm's, of two blocks of its two kinds: a reader takes the time
    of their tensors."""
    torch.manual_seed(seed)
    blocks = decode_arch_def([["ds_r1_k3_s1_e1_c8_se0.25"], ["ir_r1_k3_s2_e2_c8_se0.25"]])
    return EfficientNet(blocks, num_classes=3, num_features=8, stem_size=8)


@pytest.fixture(scope="module")
def models():
    return network(0), network(1)


@pytest.fixture(scope="module")
def states(models):
    """Of a model and of its moving average."""
    return tuple(model.state_dict() for model in models)


def without_counts(tensors):
    return {
        name: tensor for name, tensor in tensors.items() if not name.endswith("num_batches_tracked")
    }


def assert_read(path, expected, which=None, notes=()):
    stored = read(str(path), which)
    assert_bitwise_equal(without_counts(stored.tensors), without_counts(expected))
    assert [note for note in stored.notes if not any(words in note for words in notes)] == []
    return stored


def prefixed(state, prefix):
    return {prefix + name: tensor for name, tensor in state.items()}


def within(state, *keys):
    for key in reversed(keys):
        state = {key: state}
    return state


PREFIXES = [
    "", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "model.", "net.", "model.net.",
    "model._orig_mod.module.", "_orig_mod.model.module.", "timm_model.", "backbone.encoder.", "network.module.net.",
    "_fsdp_wrapped_module.", "module.module.",
]  # fmt: skip
# timm on Python 3.8 does not know the last one.
BY_TIMM = ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."][
    : 5 if KEEPS_SETTINGS_OUT else 4
]
KEYS = [
    (), ("state_dict",), ("model",), ("model_state_dict",), ("net",), ("module",), ("model", "state_dict"),
    ("checkpoint", "model_state"),
]  # fmt: skip


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes_of_wrappers_in_any_order_are_taken_off(states, tmp_path, prefix):
    """In a state dict, below a key, and in .safetensors; timm's reader takes off some of them."""
    state = prefixed(states[0], prefix)
    torch.save(state, tmp_path / "w.pth")
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "w.ckpt")
    safetensors.torch.save_file(state, str(tmp_path / "w.safetensors"))
    for path in tmp_path.iterdir():
        assert_read(path, states[0])
        if prefix in BY_TIMM:
            peer = timm.models.load_state_dict(str(path))
            assert_bitwise_equal(without_counts(read(str(path)).tensors), without_counts(peer))


def test_names_with_wrappers_of_some_blocks_are_mended(states, tmp_path):
    """As checkpointing and compiling block by block leave them."""
    inner = {
        "blocks.0.": "blocks.0._checkpoint_wrapped_module.",
        "blocks.1.0.": "blocks.1.0._orig_mod.",
    }
    state = dict(states[0])
    for old, new in inner.items():
        state = {
            name.replace(old, new, 1) if name.startswith(old) else name: each
            for name, each in state.items()
        }
    assert sum("_" in name.split(".")[2] for name in state if name.startswith("blocks.0")) > 0
    torch.save(state, tmp_path / "w.pt")
    assert_read(tmp_path / "w.pt", states[0])


def test_weights_under_a_key_that_only_resembles_an_optimizers_are_read(states, tmp_path):
    torch.save(
        {"optimal_weights": states[0], "optim_state": {"state": dict(states[1])}}, tmp_path / "w.pt"
    )
    assert_read(tmp_path / "w.pt", states[0])


@pytest.mark.parametrize("keys", KEYS, ids=".".join)
@pytest.mark.parametrize("suffix", [".pth.tar", ".bin"])
def test_what_stands_beside_the_weights_does_not_matter(states, tmp_path, keys, suffix):
    """Numbers, None, lists, a criterion, and the state of an optimizer, which has tensors under the
    model's names."""
    beside = {
        "epoch": 3,
        "metric": 71.2,
        "best": None,
        "scaler": {"scale": torch.tensor(2.0)},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "by_name": dict(states[1])},
        "rng_state": torch.zeros(8, dtype=torch.uint8),
        "history": [{"loss": torch.tensor(1.0)}],
    }
    content = {**within(states[0], *keys), **(beside if keys else {})}
    path = tmp_path / f"w{suffix}"
    torch.save(content, path)
    assert_read(path, states[0])


@newer_torch
@pytest.mark.parametrize("legacy", [False, True])
def test_settings_and_numbers_of_numpy_are_left_out(states, tmp_path, legacy):
    """As timm's train.py, torchvision's references and Lightning store them, also in torch's format
    of before 1.6."""
    settings = collections.defaultdict(list, a=[1])
    about = {
        "args": NAMESPACE,
        "metric": np.float64(71.2),
        "curve": np.arange(3.0),
        "seed": np.int64(3),
        "settings": settings,
        "counts": collections.Counter("ab"),
        "last": collections.deque([1, 2]),
        "folder": pathlib.Path("x"),
        "at": datetime.datetime(2024, 1, 1),
        "took": datetime.timedelta(1),
        "epoch": 3,
    }
    torch.save(
        {"state_dict": states[0], **about},
        tmp_path / "w.pth.tar",
        _use_new_zipfile_serialization=not legacy,
    )
    assert_read(tmp_path / "w.pth.tar", states[0])
    for key in about:
        torch.save(
            {"model": states[0], key: about[key]},
            tmp_path / "w.pth",
            _use_new_zipfile_serialization=not legacy,
        )
        assert_read(tmp_path / "w.pth", states[0])


def test_stand_ins_never_see_the_classes_they_stand_for(states, tmp_path):
    """NumPy would read memory that a forged dtype names; here nothing of the file reaches it."""
    assert {each.__module__ for each in unpickling.STAND_INS.values()} == {"training.unpickling"}
    if KEEPS_SETTINGS_OUT:
        before = set(torch.serialization.get_safe_globals())
        torch.save(
            {"state_dict": states[0], "metric": np.float64(1), "args": NAMESPACE},
            tmp_path / "w.pth",
        )
        content = unpickling.unpickled_of_others(tmp_path / "w.pth")
        assert {type(content[key]).__module__ for key in ("metric", "args")} == {
            "training.unpickling"
        }
        assert not vars(content["args"])
        assert set(torch.serialization.get_safe_globals()) == before
        assert unpickling.unpickled(tmp_path / "w.pth") is None, "our own have none of it"


class Hostile:
    """Unpickled by the usual means, it makes a folder."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.mkdir, (self.target,)


@pytest.mark.parametrize("legacy", [False, True])
def test_code_beside_weights_does_not_run_and_is_named(states, tmp_path, legacy):
    path = tmp_path / "w.pth"
    torch.save(
        {"state_dict": states[0], "args": Hostile(tmp_path / "proof")},
        path,
        _use_new_zipfile_serialization=not legacy,
    )
    with pytest.raises(
        CheckpointError, match=r"w\.pth: holds [\w.]+, .*save the state dict by itself"
    ):
        read(str(path))
    assert not (tmp_path / "proof").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "proof").exists()


def averaged(model):
    """The state dict of torch's AveragedModel, whose names begin with `module.`."""
    return AveragedModel(model).state_dict()


BOTH = {
    "timm": lambda state, ema, average: {
        "state_dict": state,
        "state_dict_ema": ema,
        "arch": "efficientnet_b0",
    },
    "timm, compiled": lambda state, ema, average: {
        "state_dict": prefixed(state, "_orig_mod."),
        "state_dict_ema": prefixed(ema, "module._orig_mod."),
    },
    "torchvision": lambda state, ema, average: {"model": state, "model_ema": average, "epoch": 3},
    "ema": lambda state, ema, average: {"model": state, "ema": {"module": ema, "decay": 0.9}},
    "ema_state_dict": lambda state, ema, average: {
        "model_state_dict": state,
        "ema_state_dict": ema,
    },
    "lightning": lambda state, ema, average: {
        "state_dict": {
            **prefixed(state, "model."),
            **prefixed(ema, "ema_model.module."),
            "loss.weight": torch.ones(3),
        },
        "pytorch-lightning_version": "2.5",
    },
    "basicsr": lambda state, ema, average: {"params": state, "params_ema": ema},
    "swa": lambda state, ema, average: {"net": state, "swa_model": average},
}


@pytest.mark.parametrize("kind", BOTH)
def test_of_trained_and_averaged_weights_the_choice_is_said_and_can_be_made(
    models, states, tmp_path, kind
):
    path = tmp_path / "w.pth"
    torch.save(BOTH[kind](*states, averaged(models[1])), path)
    trained = read(str(path))
    assert_bitwise_equal(without_counts(trained.tensors), without_counts(states[0]))
    (note,) = trained.notes
    assert (
        "the trained ones are taken" in note
        and "model.init_weights=ema, or --weights ema, takes the others" in note
    )
    ema = read(str(path), "ema")
    assert_bitwise_equal(without_counts(ema.tensors), without_counts(states[1]))
    assert (trained.which, ema.which) == (
        "trained",
        "ema",
    ) and "the ema ones are taken" in ema.notes[0]
    if kind.startswith("timm"):
        for use_ema, found in ((True, ema), (False, trained)):
            peer = timm.models.load_state_dict(str(path), use_ema=use_ema)
            assert_bitwise_equal(without_counts(peer), without_counts(found.tensors))


def test_averaged_weights_alone_are_taken_and_that_is_said(models, states, tmp_path):
    average = averaged(models[1])
    for content in (
        {"state_dict_ema": states[1]},
        {"model_ema": average},
        average,
        {"ema": {"module": states[1]}},
    ):
        torch.save(content, tmp_path / "w.pth")
        for which, notes in ((None, 1), ("trained", 1), ("ema", 0)):
            stored = read(str(tmp_path / "w.pth"), which)
            assert_bitwise_equal(without_counts(stored.tensors), without_counts(states[1]))
            assert stored.which == "ema" and len(stored.notes) == notes
            assert all("has ema weights only" in note for note in stored.notes)
    torch.save({"state_dict": states[0]}, tmp_path / "w.pth")
    with pytest.raises(
        CheckpointError,
        match=r"has no ema, its weights are trained \(state_dict\); ask for trained",
    ):
        read(str(tmp_path / "w.pth"), "ema")


def test_the_recipe_chooses_for_files_without_one_and_the_command_line_goes_before(
    states, tmp_path
):
    """Read by evaluate.py and tools.export."""
    path = str(tmp_path / "w.pth")
    torch.save({"state_dict": states[0], "state_dict_ema": states[1]}, path)
    config = str(ROOT / "configs" / "finetune_timm.yaml")
    plain = ["model.init_from=timm:efficientnet_b0", "model.classes=3"]
    for which, overrides, expected in (
        (None, plain, "trained"),
        (None, [*plain, "model.init_weights=ema"], "ema"),
        ("trained", [*plain, "model.init_weights=ema"], "trained"),
        ("ema", plain, "ema"),
    ):
        stored, _ = opened(path, which, False, config=config, overrides=overrides)
        assert stored.which == expected


def test_of_several_models_the_usual_one_is_taken_or_none(states, tmp_path):
    path = tmp_path / "w.pth"
    torch.save({"state_dict": states[0], "best_weights": states[1]}, path)
    stored = read(str(path))
    assert_bitwise_equal(without_counts(stored.tensors), without_counts(states[0]))
    assert stored.notes == (
        f"{path}: of several models that of state_dict is taken, not best_weights",
    )
    torch.save({**prefixed(states[0], "student."), **prefixed(states[1], "teacher.")}, path)
    with pytest.raises(
        CheckpointError,
        match=r"has several models \(student, teacher\); save the state dict of one",
    ):
        read(str(path))
    torch.save({**states[0], **prefixed(states[1], "_orig_mod.")}, path)
    with pytest.raises(
        CheckpointError, match=r"has conv_stem.weight twice, once as _orig_mod.conv_stem.weight"
    ):
        read(str(path))


def test_storages_and_dtypes_of_any_kind_are_read(states, tmp_path):
    """Views of one flat buffer, strided and expanded tensors, parameters, half precision."""
    state = without_counts(states[0])
    flat = torch.cat([each.flatten() for each in state.values()])
    views = dict(zip(state, flat.split([each.numel() for each in state.values()])))
    shared = {name: view.view(state[name].shape) for name, view in views.items()}
    strided = {
        name: each.transpose(0, -1).contiguous().transpose(0, -1) for name, each in state.items()
    }
    parameters = {name: nn.Parameter(each) for name, each in state.items()}
    half = {name: each.half() for name, each in state.items()}
    constant = {name: torch.zeros(1).expand(each.shape) for name, each in state.items()}
    for content, expected in (
        (shared, state),
        (strided, state),
        (parameters, state),
        (collections.OrderedDict(state), state),
        (half, half),
        (constant, constant),
    ):
        torch.save(content, tmp_path / "w.pt")
        assert_read(tmp_path / "w.pt", expected)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_without_plain_numbers_are_refused(states, tmp_path):
    name = "conv_stem.weight"
    weight = states[0][name]
    others = [(weight + 1j, "complex"), (weight.to_sparse(), "sparse")]
    if KEEPS_SETTINGS_OUT:  # torch 2.0.1 itself refuses them
        others.append((torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8), "quantized"))
    for other, words in others:
        torch.save({**states[0], name: other}, tmp_path / "w.pt")
        with pytest.raises(CheckpointError, match=f"{name} is a tensor that is {words}"):
            read(str(tmp_path / "w.pt"))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_an_error_names_what_the_file_holds(models, states, tmp_path):
    """Not a recipe's key that would not help."""
    path = tmp_path / "w.pt"
    cases = {
        "it holds a list": [1],
        "it is a dictionary of epoch, args": {"epoch": 3, "args": {}},
        "holds timm.models.efficientnet.EfficientNet, and to load that could run code": models[0],
    }
    for words, content in cases.items():
        torch.save(content, path)
        with pytest.raises(CheckpointError, match=words):
            read(str(path))
    torch.jit.script(nn.Linear(2, 2)).save(str(path))
    with pytest.raises(
        CheckpointError,
        match=r"is packed as torch\.save packs no weights, perhaps a TorchScript program; save the state dict",
    ):
        read(str(path))
    path.write_bytes(pickle.dumps({"a": 1}, protocol=4))
    with pytest.raises(
        CheckpointError, match="not weights: neither a checkpoint of this program nor a state dict"
    ):
        read(str(path))


def test_a_torch_without_safe_globals_says_what_to_do(states, tmp_path, monkeypatch):
    """torch 2.0.1 on IPUs."""
    monkeypatch.delattr(torch.serialization, "safe_globals", raising=False)
    torch.save({"state_dict": states[0], "args": NAMESPACE}, tmp_path / "w.pth.tar")
    words = (
        r"holds argparse\.Namespace, which torch \S+ cannot leave out; "
        r"read the file with torch 2\.6 or newer, or save"
    )
    with pytest.raises(CheckpointError, match=words):
        read(str(tmp_path / "w.pth.tar"))


def test_another_architecture_is_named_by_its_tensors():
    shapes = {"stem.conv_stem.weight": (2, 3), "head.classifier.weight": (10, 2)}
    names = [f"layer{i}" for i in range(9)]
    other = StoredWeights(Path("w.pth"), {name: torch.ones(2) for name in names})
    words = r"none of its tensors \(layer0, layer1, layer2, layer3, layer4 and 4 more\) has a name of the model"
    with pytest.raises(CheckpointError, match=words):
        fitted(other, shapes, Model(), new_classifier=False)
    more = {name: torch.ones(shape) for name, shape in shapes.items()}
    partly = StoredWeights(Path("w.pth"), {**more, **other.tensors})
    with pytest.raises(
        CheckpointError,
        match=r"layer0, layer1, layer2, layer3, layer4 and 4 more have no place",
    ):
        fitted(partly, shapes, Model(), new_classifier=False)
    for shape in ((), (5,), (0, 0, 0, 0)):
        odd = {
            name: torch.ones(shape)
            for name in ("blocks.1.0.conv_pw.weight", "blocks.1.0.conv_dw.weight")
        }
        with pytest.raises(CheckpointError, match="no place in the model"):
            fitted(
                weights.StoredWeights(Path("w.pth"), {**more, **odd}),
                shapes,
                Model(),
                new_classifier=False,
            )


def test_a_family_of_ones_own_is_found_by_the_usual_keys(tmp_path):
    """Without anchors: the names that programs give to the one model that they train."""
    own = {"body.0.weight": torch.ones(2), "head.bias": torch.zeros(2)}
    for content in (
        own,
        {"state_dict": prefixed(own, "model.module.")},
        {"net": own, "ema": prefixed(own, "module.")},
    ):
        torch.save(content, tmp_path / "w.pt")
        assert_bitwise_equal(read(str(tmp_path / "w.pt")).tensors, own)


def test_numbers_and_vectors_beside_a_model_without_an_anchor_are_left_out(tmp_path):
    """As PyTorch's ImageNet example, Lightning and scripts keep scores and the state of a
    generator."""
    torch.manual_seed(0)
    own = {"layer.0.weight": torch.randn(2, 3), "layer.0.bias": torch.zeros(2)}
    ema = {name: tensor + 1 for name, tensor in own.items()}
    about = {"best_model_score": torch.tensor(0.7), "dirpath": "x"}
    cases = (
        {"epoch": 3, "state_dict": prefixed(own, "module."), "best_acc1": torch.tensor(71.2)},
        {
            "state_dict": prefixed(own, "model."),
            "callbacks": {"ModelCheckpoint{'mode': 'max'}": about},
        },
        {"state_dict": {**prefixed(own, "model."), "loss.weight": torch.ones(3)}},
        {"model": own, "rng_state": torch.get_rng_state()},
        {"model": own, "model_ema": {"module": ema}, "best": torch.tensor(0.5)},
        {"model": own, "ema": {"decay": torch.tensor(0.9)}},
    )
    for content in cases:
        torch.save(content, tmp_path / "w.pth.tar")
        assert_bitwise_equal(read(str(tmp_path / "w.pth.tar")).tensors, own)
    torch.save(cases[4], tmp_path / "w.pth.tar")
    assert_bitwise_equal(read(str(tmp_path / "w.pth.tar"), "ema").tensors, ema)
    # Two with matrices: nothing says which is the model, so that every name counts.
    torch.save({"model": own, "other": ema}, tmp_path / "w.pth.tar")
    assert len(read(str(tmp_path / "w.pth.tar")).tensors) == 4

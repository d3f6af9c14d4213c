"""Models of timm in a run: stopped and resumed, on two replicas, with half weights, and back in
timm."""

import pytest
import safetensors.torch
import timm
import torch

from models.families import build
from recipe import loading
from tests import ranks
from tests.tensors import flat
from tests.training.test_resume import Outcome
from tests.training.test_several_ranks import DONE, STOPPED, in_this_process, train_to_the_end
from tools import export
from training.checkpoint import load

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

ARCHITECTURES = ("resnet18", "convnext_atto", "vit_tiny_patch16_224")
# Ten steps of 24 images; layers draw, images are mixed and weights are rounded stochastically.
SMALL = (
    *ranks.SMALL,
    "data.glyph_size=32",
    "data.image_sizes=null",
    "log.noise_scale=false",
    "model.width=null",
    "model.depth=null",
    "model.name=timm",
    "model.image_size=32",
    "model.drop_path=0.1",
)


def overrides(architecture, folder):
    return (*SMALL, f"model.architecture={architecture}", f"run.output={folder}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, _one_thread):
    """Folder of the run in one process by architecture, trained once."""
    root = tmp_path_factory.mktemp("runs")
    for architecture in ARCHITECTURES:
        train_to_the_end(1, *overrides(architecture, root / architecture))
    return root


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_stopped_run_goes_on_to_equal_bits(runs, tmp_path, architecture):
    given = overrides(architecture, tmp_path / "run")
    assert in_this_process(*given, stop_at=4).code == STOPPED
    train_to_the_end(1, *given)
    Outcome(tmp_path / "run").assert_same(Outcome(runs / architecture))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_replicas_in_tree_order_are_one_process(runs, tmp_path, architecture):
    """Running statistics, which are added up in float64 over replicas, to float32's rounding; all
    else to the bit."""
    train_to_the_end(2, *overrides(architecture, tmp_path / "run"))
    two = Outcome(tmp_path / "run")
    one = Outcome(runs / architecture)
    assert two.of("train") == one.of("train")
    tensors = flat(two.engine)
    expected = flat(one.engine)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        if "running_" in name:
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_stages_are_one(runs, tmp_path, architecture):
    train_to_the_end(2, *overrides(architecture, tmp_path / "run"), "parallel.stages=2")
    Outcome(tmp_path / "run").assert_same(Outcome(runs / architecture))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_timm_loads_what_is_exported_and_has_the_same_logits(runs, tmp_path, architecture):
    """The safetensors to the bit; the ONNX program is compared by the command itself, which ends
    with 1 otherwise."""
    path = tmp_path / "weights.safetensors"
    assert (
        export.main([str(runs / architecture), "--format", "safetensors", "--output", str(path)])
        == DONE
    )
    options = {"img_size": 32} if architecture.startswith("vit") else {}
    theirs = timm.create_model(architecture, num_classes=10, **options).eval()
    tensors = safetensors.torch.load_file(path)
    counts = {
        name: tensor
        for name, tensor in theirs.state_dict().items()
        if name.endswith("num_batches_tracked")
    }
    theirs.load_state_dict({**tensors, **counts})

    content = load(runs / architecture / "checkpoints" / "step-00000010.pt")
    ours = build(loading.loads(content["recipe"], "checkpoint").model, 0).eval()
    state = {**content["engine"]["weights"], **content["engine"]["buffers"]}
    ours.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(theirs(ours.block("preprocess")(images)), ours(images))
    onnx = tmp_path / "model.onnx"
    assert (
        export.main([str(runs / architecture), "--format", "onnx", "--output", str(onnx)]) == DONE
    )

"""Every operator that the modules for IPUs call is one that PopTorch 3.4 lowers to PopART.

The double runs whatever torch can; an operator without a handler would only be found on a machine
with the SDK.
"""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from engines.ipu_model import EvaluationModule, Marks, TrainingModule, device_model
from recipe import loading
from tests.conftest import ROOT

pytestmark = pytest.mark.ipu

# Where each has its handler: files of poptorch/source/popart_canonicalization. `_to_copy` is what a
# conversion of the dtype becomes on the way, `to` (dispatch_tracer/RegisterAtenOverloads.cpp); an
# operator in place, with a _ at its end, has the handler of the one without (InplaceOps.cpp).
HANDLERS = {
    "ArithmeticOps.cpp": "add mul addcmul div",
    "AtenHandlers.gen.cpp": "addmm constant_pad_nd detach eq ge lt neg rsub sigmoid silu t where",
    "BitwiseOps.cpp": "bitwise_and",
    "ConstantOps.cpp": "arange ones zeros",
    "ConvolutionOps.cpp": "convolution",
    "DropoutOps.cpp": "dropout",
    "NormalizationOps.cpp": "native_group_norm",
    "ReduceOps.cpp": "argmax mean sum",
    "ReshapeOps.cpp": "expand permute select transpose unsqueeze view _unsafe_view _to_copy",
    "SliceOps.cpp": "slice",
    "SoftmaxOps.cpp": "_log_softmax",
    "TensorOps.cpp": "clone copy_ roll",
}
KNOWN = {operator for operators in HANDLERS.values() for operator in operators.split()}


class Recording(TorchDispatchMode):
    """Names of the operators that are called within, without namespace and overload."""

    def __init__(self):
        super().__init__()
        self.operators = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operators.add(function._schema.name.split("::")[1])
        return function(*args, **(kwargs or {}))


def called(function, *inputs, monkeypatch):
    """Dropout is one operator for PopTorch, and several on a CPU."""
    with Recording() as recording, monkeypatch.context() as patch:

        def dropout(x, rate, training):
            recording.operators.add("dropout")
            return x

        patch.setattr(F, "dropout", dropout)
        function(*inputs)
    return {
        name[:-1] if name.endswith("_") and name != "copy_" else name
        for name in recording.operators
    }


@pytest.mark.parametrize(
    "overrides", [(), ("model.norm=layer", "model.padding=torch", "data.cutmix=null")]
)
def test_every_operator_has_a_handler(overrides, monkeypatch):
    small = (
        "model.name=efficientnet_b0",
        "model.width=0.25",
        "model.depth=0.3",
        "model.image_size=32",
    )
    recipe = loading.load(ROOT / "configs" / "pod256.yaml", [*small, *overrides])
    images = torch.zeros(3, 3, 32, 32, dtype=torch.uint8)
    model = device_model(recipe.model, recipe.run.seed, torch.float32)
    training = TrainingModule(model, 0.1, 1000, Marks()).train()
    found = called(
        training,
        images,
        torch.zeros(3, dtype=torch.int32),
        torch.ones(3, 6),
        monkeypatch=monkeypatch,
    )
    assert {"dropout", "convolution", "native_group_norm", "roll"} <= found <= KNOWN
    with torch.no_grad():
        assert (
            called(EvaluationModule(model, Marks()).eval(), images, monkeypatch=monkeypatch)
            <= KNOWN
        )

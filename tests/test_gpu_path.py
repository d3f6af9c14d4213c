"""What can be tested of the GPU path without a GPU: kernels compile, spill no registers and are
launched with their arguments, and nothing waits.

The interpreter of the other tests takes code that Triton's compiler refuses.
"""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engines.base import one_step

# not from tests.conftest, which turns on the interpreter
_ROOT = Path(__file__).resolve().parent.parent


# Kernels ------------------------------------------------------------------------------------------


def spilled_bytes(machine_code: bytes, folder: Path) -> int:
    """Bytes of registers that a thread keeps in local memory, by the disassembler of Triton's
    wheel."""
    import triton

    file = folder / "kernel.cubin"
    file.write_bytes(machine_code)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run(
        [tool, "-res-usage", file], capture_output=True, text=True, check=True
    ).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])


_COMPILE = """
import sys
from pathlib import Path

import torch
from models.efficientnet import build
from models.kernels import group_conv, group_norm, squeeze
from models.normalization import GroupNormAct
import optim.lars
from optim.kernels import lars
from recipe.config import Model
from tests.optim.test_lars_update import state_of
from tests.recording_driver import launched, start
from tests.test_gpu_path import spilled_bytes

folder = Path(sys.argv[1])
driver = start(folder)


def sound(work):
    made = launched(driver, work)
    for launch in made:
        assert "atom" not in launch.ptx, launch.name
        assert spilled_bytes(launch.machine_code, folder) == 0, launch.name
        assert launch.passed == launch.expected, launch.name
    return [(launch.name, launch.ptx) for launch in made]


optim.lars.update_class = lambda device: lars.TritonLarsUpdate
for form, compute, dtype in {updates}:
    state, _ = state_of(form, compute, dtype)
    state._update.host_may_read = False
    made = dict(sound(lambda: state.update(0, 0.5, torch.ones(()), True)))
    print(sorted(made) == ["_add_squares", "_merge", "_none_wrong", "_step", "_trust_ratios"])

for form, kernel, stride in {convolutions}:
    norm = group_norm.FusedGroupNormAct.of(GroupNormAct(64, 4, 1e-3)).half()
    block = squeeze.fuse(build(Model(name="efficientnet_b0"), seed=0).block("blocks.1.0")).half()
    x = torch.zeros(2, 64, 16, 16, dtype=torch.float16).contiguous(memory_format=form)
    x.requires_grad_()
    for kept, residual in ((x[:, 0, 0, 0].contiguous(), x), (None, None)):
        made = sound(lambda: norm.added(x, kept, residual).sum().backward())
        print(len(made) == 6)
    made = sound(lambda: block.bn2(x).sum().backward())
    print(len(made) == 9)

    # As large as layers of a B4 are: sizes choose the tiles, and with them the registers.
    x = torch.empty(32, 144, 96, 96, dtype=torch.float16, device="meta").contiguous(memory_format=form)
    weight = torch.empty(144, 16, kernel, kernel, dtype=torch.float16, device="meta")
    launches = group_conv.Launches(x, weight, stride, True)
    dy = x[:, :, ::stride, ::stride].contiguous(memory_format=form)

    def work():
        packed = launches.packed(weight)
        launches.output(x, packed, launches.partial(x, form is torch.channels_last))
        launches.input_gradient(dy, packed)
        launches.weight_gradient(x, dy)

    for name, ptx in sound(work):
        wide = "ld.global.v4.b32" in ptx
        products = name == "add_parts" or "mma" in ptx
        print(products and (wide or form is torch.contiguous_format))
"""
_HALF = (torch.float16, torch.float16)
_REST = [
    ("nesterov", *_HALF),
    ("momentum", torch.bfloat16, torch.float16),
    ("momentum", torch.float32, torch.float32),
]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile the kernels")
@pytest.mark.parametrize(
    ("updates", "convolutions"),
    [
        ([("gradient", *_HALF)], [(torch.channels_last, 3, 1)]),
        (_REST, [(torch.channels_last, 5, 1), (torch.contiguous_format, 3, 2)]),
    ],
)
def test_kernels_compile_for_a_gpu_spill_no_registers_and_get_their_arguments(
    tmp_path, updates, convolutions
):
    """Without atomics, which add in any order.

    Convolutions use tensor cores and wide loads of channels.
    """
    pytest.importorskip("triton")
    script = _COMPILE.format(updates=updates, convolutions=convolutions)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["True"] * (len(updates) + 7 * len(convolutions))


# Waiting ------------------------------------------------------------------------------------------

META = torch.device("meta")
_VALUES_FOR_THE_HOST = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select")
_WITHOUT_A_KERNEL = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class Waits(TorchDispatchMode):
    """Lists the operators for which the host would wait if the meta device were a GPU.

    These are operators that return values to the host, and copies that are not asynchronous or
    whose memory on the host is not page-locked. Page-locked is what was made so within.

    Attributes:
        waits: names of the operators, in their order.
        kernels: names of the operators that compute on the device.
    """

    def __init__(self):
        super().__init__()
        self.waits = []
        self.kernels = []
        self._locked = {}  # by address; kept alive, so that no other tensor gets it
        self._patches = contextlib.ExitStack()

    def __enter__(self):
        made = torch.tensor  # does not show its copy to a device
        replacements = (
            (torch.cuda, "is_available", lambda: True),
            (torch.Tensor, "pin_memory", lambda tensor: self._pin(tensor)),
            (torch, "tensor", lambda data, device="cpu", **rest: made(data, **rest).to(device)),
        )
        for owner, name, replacement in replacements:
            self._patches.enter_context(mock.patch.object(owner, name, replacement))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if name in _VALUES_FOR_THE_HOST and any(each.is_meta for each in given):
            self.waits.append(name)
            return torch.zeros((), dtype=given[0].dtype).item()
        if name == "_to_copy" and given[0].is_meta and str(kwargs.get("device")) == "cpu":
            self.waits.append(name)
            return torch.zeros(given[0].shape, dtype=kwargs.get("dtype") or given[0].dtype)
        result = function(*args, **kwargs)
        made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        if not any(each.is_meta for each in [*made, *given]):
            return result
        from_host = [each for each in given if not each.is_meta and each.dim()]
        if from_host:
            asynchronous = kwargs.get("non_blocking") or (name == "copy_" and True in args[2:])
            locked = from_host[0].untyped_storage().data_ptr() in self._locked
            if not (asynchronous and locked):
                self.waits.append(name)
        elif not function.is_view and name not in _WITHOUT_A_KERNEL:
            self.kernels.append(name)
        return result

    def _pin(self, tensor):
        pinned = tensor.clone()
        self._locked[pinned.untyped_storage().data_ptr()] = pinned
        return pinned


def waits_of(program):
    with Waits() as found:
        program()
    return found.waits


X = torch.empty(4, 8, device=META)


@pytest.mark.parametrize(
    ("program", "waits"),
    [
        (lambda: torch.zeros(3).add(1).sum().item(), []),  # on the host
        (lambda: torch.relu(X + X).mul_(2), []),
        (lambda: X * torch.tensor(2.0), []),  # a number of the host is an argument of the kernel
        (lambda: X.sum().item(), ["_local_scalar_dense"]),
        (lambda: X.sum().cpu(), ["_to_copy"]),
        (lambda: torch.tensor([1.0, 2.0], device=META), ["_to_copy"]),
        (lambda: X[torch.tensor([1, 2])], ["index"]),
        (lambda: torch.zeros(3).to(META, non_blocking=True), ["_to_copy"]),
        (lambda: torch.zeros(3).pin_memory().to(META), ["_to_copy"]),
        (lambda: torch.zeros(3).pin_memory()[1:].to(META, non_blocking=True), []),
        (lambda: X[0].copy_(torch.zeros(8).pin_memory(), non_blocking=True), []),
    ],
)
def test_copies_and_values_for_the_host_are_waits(program, waits):
    assert waits_of(program) == waits


@pytest.fixture
def engine_of(monkeypatch):
    """engine_of(*overrides): an engine for configs/gpu.yaml on the meta device, and micro batches
    for it."""
    from data.batches import MicroBatch
    from engines import factory, torch_engine, tuning
    from recipe import loading
    from recipe.batch import divide

    apply = tuning.apply
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch_engine, "device_of", lambda *_: META)
    monkeypatch.setattr(tuning, "check", lambda *_: None)
    monkeypatch.setattr(tuning, "apply", lambda model, section, _: apply(model, section, cuda))

    def create(*overrides):
        recipe = loading.load(
            _ROOT / "configs" / "gpu.yaml",
            [
                "model.name=efficientnet_b0",
                "model.width=0.25",
                "model.depth=0.4",
                "model.image_size=32",
                "model.classes=10",
                "batch.micro=4",
                "batch.global=8",
                "engine.memory_format=channels_last",
                "engine.kernels=torch",
                *overrides,
            ],
        )
        images = torch.empty(4, 3, 32, 32, dtype=torch.uint8, device=META)
        labels = torch.zeros(4, dtype=torch.int64)
        batches = [MicroBatch(images, labels, labels, 4, place, 0, ()) for place in range(2)]
        return factory.create(recipe, divide(recipe), steps_per_epoch=100), batches

    return create


def in_page_locked_memory(batches):
    """The batches as the prefetcher leaves them: images on the device, labels in page-locked
    memory."""
    return [batch._replace(labels=batch.labels.pin_memory()) for batch in batches]


_PLAIN = ("parallel.recompute=true", "data.mixup=0", "data.cutmix=null")


@pytest.mark.parametrize("changes", [(), pytest.param(_PLAIN, marks=pytest.mark.slow)], ids=len)
def test_a_step_waits_for_nothing(engine_of, changes):

    engine, batches = engine_of(*changes)
    for step in (1, 5):  # the first makes what stays; neither measures the noise scale
        with Waits() as found:
            engine.train_step(iter(in_page_locked_memory(batches)), one_step(step), 0.1)
    assert found.waits == [] and found.kernels


def test_scores_wait_for_nothing(engine_of):
    engine, batches = engine_of()
    with Waits() as found:
        for batch in in_page_locked_memory(batches):
            engine.evaluate_step(batch)
    assert found.waits == [] and found.kernels

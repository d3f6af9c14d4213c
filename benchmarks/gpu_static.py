"""What can be said of our GPU kernels without a GPU: python -m benchmarks.gpu_static [--json] [--quick]

EfficientNet-B4 with groups of 16 at 380 px goes forward and backward in float16 on the meta device, 32 images; our
Triton kernels are compiled for compute capability 9.0 and disassembled.

Issue floor: instructions that the warps of all launches issue, among them those of lanes without a pixel, at four
instructions a clock on each of 132 multiprocessors at 1.755 GHz (an H100 SXM's clock under load; it is no limit that
memory, latency or occupancy set). Instructions that predicates switch off are issued as well. A pixel is one of the
output (of the input, for its gradient) and of one group.

Gigabytes: what operators and kernels read and write, each tensor once an operator: a memory that caches nothing
between two kernels and everything within one. Weights and their gradients are counted, the update is not.
"""

if __name__ == "__main__":  # before the imports: see run
    from training.command import run

    run(__file__)

import math
from typing import Any, Dict, Iterable, List, Sequence, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks import claims
from benchmarks.gpu_assembly import Launch, launches
from models.efficientnet import build
from models.kernels.patching import patch
from models.stochastic import AHEAD
from recipe.config import Model

_MODEL, _IMAGES, _SIZE = "efficientnet_b4", 32, 380
_ISSUED = 132 * 4 * 1.755e9  # instructions a second
_BANDWIDTH = 4.3e12  # bytes a second: a copy on an H200
_LAYOUTS = {"NHWC": torch.channels_last, "NCHW": torch.contiguous_format}


def main() -> None:
    as_json = claims.begin(__doc__, takes="4 minutes", quick="1 minute").json
    rows: List[dict] = []
    for layout, memory_format in list(_LAYOUTS.items())[: claims.less(2, 1)]:
        found, moved = _pass(memory_format)
        rows += _issued(found, layout)
        # Figures without a goal: on an H200 fewer bytes and instructions were not faster.
        print(f"{layout}: operators read and write {moved / _IMAGES / 1e9:.3f} GB an image")
    spilled = [max(row["spilled"] for row in rows)]
    made = claims.claim("spilled_registers", spilled, "32-bit registers", "<= 0")
    claims.report("gpu_static", rows, [made], as_json)


class _Traffic(TorchDispatchMode):
    """Counts bytes that torch's operators read and write: of a view nothing, of an expanded tensor what there is."""

    def __init__(self, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        self.bytes, self.memory_format = 0, memory_format

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not (function.is_view or "empty" in function.name() or function is torch.ops.aten._unsafe_view.default):
            self.bytes += moved(tree_leaves((args, kwargs, result)))
        if function is torch.ops.aten.convolution_backward.default and all(args[-1][:2]):
            self.bytes += moved(args[:1])  # by two kernels, which both read the output's gradient
        # On the meta device convolutions forget the layout that cuDNN keeps.
        return tree_map(self._kept, result) if "convolution" in function.name() else result

    def _kept(self, value: Any) -> Any:
        return value if value is None or value.dim() < 4 else torch.empty_like(value, memory_format=self.memory_format)


def moved(values: Iterable[Any]) -> int:
    """Bytes of the tensors among `values`."""
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return sum(
        tensor.itemsize * math.prod(size for size, stride in zip(tensor.shape, tensor.stride()) if stride)
        for tensor in tensors
    )


def _pass(memory_format: torch.memory_format) -> Tuple[List[Launch], int]:
    """Launches and bytes of a forward and a backward pass; of masks drawn ahead, the share of a micro batch."""
    model = build(Model(name=_MODEL, image_size=_SIZE), seed=0)
    patch(model)
    model = model.to("meta", torch.float16)  # weights stay contiguous, as in the engine
    model.block("preprocess").memory_format = memory_format
    images = torch.empty((_IMAGES, 3, _SIZE, _SIZE), dtype=torch.uint8, device="meta")
    images = images.contiguous(memory_format=memory_format)
    found, moved_by = [], []
    for model.draws.micro_batch in range(2):  # the first draws for all
        with _Traffic(memory_format) as traffic:
            # backward() would copy gradients that `found` holds as well; the engine does not.
            found = launches(lambda: torch.autograd.grad(model(images).sum(), list(model.parameters())))
        moved_by.append(traffic.bytes + sum(moved(launch.values.values()) for launch in found))
    return found, moved_by[1] + (moved_by[0] - moved_by[1]) // AHEAD


# Instructions ---------------------------------------------------------------------------------------------------------


def _issued(found: Sequence[Launch], layout: str) -> List[dict]:
    """A row for each kernel over tiles of images, and for the group convolution's by kernel size and stride."""
    alike: Dict[tuple, List[Launch]] = {}
    for launch in (launch for launch in found if {"ROWS", "KERNEL"} & set(launch.values)):
        reversed_kernel = launch.values.get("REVERSED")
        name = "group_conv_kernels.input_gradient" if reversed_kernel else launch.kernel
        alike.setdefault((name, launch.values.get("KERNEL"), launch.values.get("STRIDE")), []).append(launch)
    if claims.quick():
        alike = {key: each for key, each in alike.items() if key[0].startswith("group_conv")}
    rows = []
    for (name, kernel, stride), each in claims.progress(sorted(alike.items(), key=str), layout):
        issued = sum(map(_executed, each))
        elements = sum(launch.values[_RESULTS.get(launch.kernel.rpartition(".")[2], "x")].numel() for launch in each)
        row = {
            "layout": layout,
            "kernel": name,
            "size": kernel,
            "stride": stride,
            "layers": len(each),
            "per_pixel": issued / elements * each[0].values["GROUP"] if kernel else None,
            "per_element": 32 * issued / elements,
            "registers": max(launch.assembly().registers for launch in each),
            "spilled": max(launch.assembly().spilled for launch in each),
            "us_per_image": issued / _ISSUED * 1e6 / _IMAGES,
        }
        rows.append(row)
    return rows


_RESULTS = {"output": "y", "strided_input_gradient": "dx", "weight_gradient": "dy"}  # whose elements are counted


def _executed(launch: Launch) -> float:
    """Instructions that all warps of a launch issue."""
    values, assembly = launch.values, launch.assembly()
    warps = launch.programs * values["num_warps"]
    if "ROWS" in values:  # its loop is over tiles of a strip; there may be none
        strips = math.ceil(values["pixels"] / (values["COLUMNS"] * values["STEPS"]))
        return warps * assembly.turned(math.ceil(values["pixels"] / values["COLUMNS"]) / strips)
    adds = values["LINES"] * values["PIXELS"] * values["GROUP"] ** 2 * values["KERNEL"] ** 2  # a warp for each group
    if "all_blocks" in values:  # one column of the kernel, round after round
        packs = values["channels"] // values["GROUP"] // values["GROUPS"]
        adds *= values["all_blocks"] * values["tiles"] * packs / launch.programs
    return warps * assembly.executed(adds)

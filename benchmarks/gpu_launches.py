"""How many kernels does the host start for a micro batch, and how often does it copy or wait? Counted without a GPU.

    python -m benchmarks.gpu_launches [--quick] [--json]

EfficientNet-B4 G16 at 380 px in float16, by our engine as configs/gpu.yaml makes it, and beside it timm's models in
timm's loop, are computed on torch's meta device, which knows shapes but no values. What an update of sixteen micro
batches counts more than one of eight, divided by eight, is a micro batch's. Rules, the same for all sides:

- launches: each operator that reaches a device is one, and so is each Triton kernel. Operators that only view or
  allocate are none. The backward pass of a convolution is one for each gradient that it computes; lists of tensors are
  one for as many tensors and chunks as torch packs into one launch (CUDA 12). Operators that start several kernels, as
  torch's group normalisation does, still count one: figures are lower bounds.
- copies: between host and device. Images and labels come as the prefetcher leaves them: images on the device, labels in
  page-locked memory.
- synchronisations: copies for which the host waits, because they are not asynchronous or their memory is not
  page-locked, and operators that return values to the host.

timm's models compute in float16 without autocast, whose casts of the weights would come on top.
"""

if __name__ == "__main__":  # before the imports: see run
    from training.command import run

    run(__file__)

import contextlib
import itertools
import math
from collections import Counter
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple
from unittest import mock

import timm
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import ROOT, claims
from benchmarks.timm_peer import create_g16
from data.batches import MicroBatch
from engines import factory, torch_engine, tuning
from models.kernels import patching
from recipe import loading
from recipe.batch import divide
from recipe.config import Recipe

META, CUDA = torch.device("meta"), torch.device("cuda")
MICRO = (32, 128)
_MORE, _FEWER = 16, 8  # micro batches of the two updates: masks are drawn for eight at once
_FREE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_pin_memory")
_ANSWERS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2")
_CAT_TENSORS = 128  # of a launch of torch.cat: CAT_ARRAY_BATCH_SIZE in torch's Shape.cu
# Of a launch over lists: torch's MultiTensorApply.cuh, by the number of lists.
_LIST_TENSORS, _LIST_BLOCKS, _LIST_CHUNK = (110, 64, 48, 36, 30), 320, 65536


class Launches(TorchDispatchMode):
    """Counts what the code within starts on the meta device, as if that were a GPU.

    launches, copies, synchronisations: by the name of the operator or kernel. Page-locked memory is that which was made
    within.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter = Counter()
        self.copies: Counter = Counter()
        self.synchronisations: Counter = Counter()
        self._locked: Dict[int, torch.Tensor] = {}  # by address; kept alive, so that no other tensor gets it
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> "Launches":
        self._patches.enter_context(mock.patch.object(torch.cuda, "is_available", lambda: True))
        self._patches.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: self._pin(tensor)))
        tensor = torch.tensor  # which does not show its copy to a device
        self._patches.enter_context(
            mock.patch.object(
                torch, "tensor", lambda data, device=None, **rest: tensor(data, **rest).to(device or "cpu")
            )
        )
        if patching.available():
            from triton.runtime.jit import JITFunction

            def launch(kernel: Any, *_: Any, **__: Any) -> None:
                self.launches[f"triton {kernel.fn.__name__}"] += 1

            self._patches.enter_context(mock.patch.object(JITFunction, "run", launch))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if name in _ANSWERS and any(each.is_meta for each in given):
            self.synchronisations[name] += 1
            return torch.zeros((), dtype=given[0].dtype).item()
        if name == "_to_copy" and given[0].is_meta and torch.device(kwargs.get("device") or META).type == "cpu":
            self._copy(name, given[0], kwargs.get("non_blocking", False))
            return torch.zeros(given[0].shape, dtype=kwargs.get("dtype") or given[0].dtype)
        result = function(*args, **kwargs)
        made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        if not any(each.is_meta for each in [*made, *given]):
            return result
        if function.is_view or name in _FREE:
            return result
        hosts = [each for each in given if not each.is_meta and each.dim()]
        if hosts:
            waits_not = name in ("_to_copy", "copy_") and (kwargs.get("non_blocking") or True in args[2:])
            self._copy(name, hosts[0], waits_not)
        else:
            self.launches[name] += _launches_of(name, args)
        return _as_cudnn_lays_it_out(args, result) if name == "convolution_backward" else result

    def _copy(self, name: str, source: torch.Tensor, asynchronous: bool) -> None:
        self.copies[name] += 1
        if not asynchronous or not (source.is_meta or source.untyped_storage().data_ptr() in self._locked):
            self.synchronisations[name] += 1

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = tensor.clone()
        self._locked[pinned.untyped_storage().data_ptr()] = pinned
        return pinned


def _launches_of(name: str, args: Sequence[Any]) -> int:
    if name == "convolution_backward":
        return sum(args[-1])  # which gradients are wanted
    if name == "cat":
        return math.ceil(len(args[0]) / _CAT_TENSORS)
    if not name.startswith("_foreach_"):
        return 1
    lists = [each for each in args if isinstance(each, (list, tuple)) and isinstance(each[0], torch.Tensor)]
    dtypes = [{each.dtype for each in tensors} for tensors in lists]
    alike = (name == "_foreach_copy_" and all(len(each) == 1 for each in dtypes)) or len(set.union(*dtypes)) == 1
    if not alike or any(len({each.stride() for each in tensors}) > 1 for tensors in zip(*lists)):
        return len(lists[0])  # one after the other
    depth = len(lists) + (not name.endswith("_"))
    launches = tensors = blocks = 0
    for tensor in lists[0]:
        tensors += 1
        for _ in range(math.ceil(tensor.numel() / _LIST_CHUNK)):
            blocks += 1
            if blocks == _LIST_BLOCKS:
                launches, tensors, blocks = launches + 1, 1, 0
        if tensors == _LIST_TENSORS[depth - 1]:
            launches, tensors, blocks = launches + 1, 0, 0
    return launches + (blocks > 0)


def _as_cudnn_lays_it_out(args: Sequence[Any], gradients: Sequence[Any]) -> List[Any]:
    """The gradients in the layout of input and, where that is channels-last, of weights: meta's are contiguous."""
    layout = torch.contiguous_format
    if args[1].is_contiguous(memory_format=torch.channels_last) and not args[1].is_contiguous():
        layout = torch.channels_last
    return [
        torch.empty_like(each, memory_format=layout) if each is not None and each.dim() == 4 else each
        for each in gradients
    ]


class Side(NamedTuple):
    """One way to train: update(count) makes an update of so many micro batches."""

    name: str
    micro: int
    update: Callable[[int], None]


def ours(layout: str, kernels: str, micro: int, *overrides: str) -> Side:
    """Our engine, on the meta device, but with the layout and kernels of a GPU."""
    engines, steps = {}, itertools.count(1, 4)  # after those updates that measure the noise scale
    for count in (_FEWER, _MORE):
        plan = _recipe(micro, count, f"engine.memory_format={layout}", f"engine.kernels={kernels}", *overrides)
        engines[count] = (_engine(plan), _micro_batches(plan))

    def update(count: int) -> None:
        engine, batches = engines[count]
        batches = [batch._replace(labels=batch.labels.pin_memory()) for batch in batches]
        engine.train_step(iter(batches), next(steps), 0.1)

    return Side(f"ours, {layout}, {kernels}", micro, update)


def evaluation(micro: int, *overrides: str) -> Side:
    """Our engine, which scores micro batches."""
    plan = _recipe(micro, _MORE, "engine.memory_format=channels_last", "engine.kernels=triton", *overrides)
    engine, batches = _engine(plan), _micro_batches(plan)

    def score(count: int) -> None:
        for batch in batches[:count]:
            engine.evaluate_step(batch._replace(labels=batch.labels.pin_memory()))

    return Side("ours, channels_last, triton: evaluation", micro, score)


def timms(name: str, model: nn.Module, micro: int, size: int = 380) -> Side:
    """timm's model, and the body of the loop in its train.py."""
    model = model.to(META, torch.float16).to(memory_format=torch.channels_last)
    loss_function = nn.CrossEntropyLoss(label_smoothing=0.1)
    images = torch.empty(micro, 3, size, size, dtype=torch.float16, device=META)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.empty(micro, dtype=torch.int64, device=META)

    def update(count: int) -> None:
        model.zero_grad()
        for _ in range(count):
            loss = loss_function(model(images), labels) / count
            loss.backward()
            loss.item()  # for its meter

    return Side(f"timm, channels_last, {name}", micro, update)


def per_micro_batch(side: Side) -> Dict[str, Counter]:
    """What a micro batch of a side counts: `launches`, `copies` and `synchronisations`, by operator."""
    found: List[Launches] = []
    for count in (_FEWER, _MORE):
        for _ in range(2):  # without what happens only once
            with Launches() as counted:
                side.update(count)
        found.append(counted)
    counts = {}
    for kind in ("launches", "copies", "synchronisations"):
        fewer, more = (getattr(each, kind) for each in found)
        names = {name: (more[name] - fewer[name]) / (_MORE - _FEWER) for name in more | fewer}
        counts[kind] = Counter({name: number for name, number in names.items() if number})
    return counts


def measured() -> Tuple[List[dict], List[dict]]:
    """Rows and claims, for all sides."""
    makers: List[Callable[[], Side]] = [lambda micro=micro: ours("channels_last", "triton", micro) for micro in MICRO]
    if not claims.quick():
        makers += [
            lambda: ours("contiguous", "triton", MICRO[0]),
            lambda: ours("channels_last", "torch", MICRO[0]),
            lambda: evaluation(MICRO[1]),
            lambda: timms("efficientnet_b4", timm.create_model("efficientnet_b4", drop_path_rate=0.2), MICRO[0]),
            lambda: timms("G16", create_g16(1000, 1.4, 1.8, 0.4, 0.2), MICRO[0]),
        ]
    rows, ours_alone = [], []
    for make in claims.progress(makers, "side"):
        side = make()
        counts = per_micro_batch(side)
        triton = sum(number for name, number in counts["launches"].items() if name.startswith("triton "))
        sums = {kind: sum(each.values()) for kind, each in counts.items()}
        rows.append({"side": side.name, "micro": side.micro, "of_triton": triton, **sums})
        if len(rows) <= len(MICRO):
            ours_alone.append(sums)
    # Launches are a figure without a goal: as recorded graphs they cost 2 % of a step.
    waits = [each["synchronisations"] for each in ours_alone]
    made = claims.claim("synchronisations_per_micro_batch", waits, "a micro batch", "<= 0")
    return rows, [made]


def main() -> None:
    as_json = claims.begin(__doc__, takes="three minutes", quick="one minute").json
    claims.report("gpu_launches", *measured(), as_json)


def _recipe(micro: int, accumulation: int, *overrides: str) -> Recipe:
    return loading.load(ROOT / "configs" / "gpu.yaml", [
        f"batch.micro={micro}", f"batch.global={micro * accumulation}", "precision.compute=float16", *overrides
    ])  # fmt: skip


def _engine(plan: Recipe) -> torch_engine.TorchEngine:
    apply = tuning.apply
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch_engine, "device_of", lambda *_: META))
        stack.enter_context(mock.patch.object(tuning, "check", lambda *_: None))
        stack.enter_context(mock.patch.object(tuning, "apply", lambda model, section, _: apply(model, section, CUDA)))
        return factory.create(plan, divide(plan), steps_per_epoch=100)


def _micro_batches(plan: Recipe) -> List[MicroBatch]:
    rows, size = plan.batch.micro, plan.model.image_size
    images = torch.empty(rows, 3, size, size, dtype=torch.uint8, device=META)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.zeros(rows, dtype=torch.int64)
    return [MicroBatch(images, labels, labels, rows, number, 0, ()) for number in range(_MORE)]

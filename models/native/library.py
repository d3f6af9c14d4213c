"""Our C++ functions for CPUs, on tensors: group normalisation with SiLU, pooling, gates, group convolutions.

Activations are float32 [N, H, W, C], contiguous: `pixels_last` of a channels-last [N, C, H, W]. Functions compute on as
many threads as torch does; their results do not depend on that number.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path
from typing import Any, List, NamedTuple, Optional, Tuple

import torch

from recipe import compilation
from recipe.compilation import CompilerError
from recipe.errors import first_line, printable

GROUP_SIZE = 16  # channels of a convolution's group
LARGEST_KERNEL = 7

# What reaches a normalisation from above, and so which sums its gradients need: `Form` in normalization.h, and the
# same as PLAIN for a normalisation without activation.
PLAIN, LINEAR, POOLED, GATED = range(4)
_SUMS = {PLAIN: 2, LINEAR: 2, POOLED: 2, GATED: 5}

_SOURCE = Path(__file__).parent / "library.cpp"
_FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)
_FUNCTIONS = (
    "group_moments_of",
    "activate_of",
    "activate_and_pool_of",
    "multiply_of",
    "gradient_sums_of",
    "merge_gradients_of",
    "input_gradient_of",
    "pack_weights_of",
    "convolution_of",
    "convolution_gradients_of",
)


def _structure(name: str, integers: str = "", pointers: str = "", threads: bool = False) -> Any:
    """A C++ struct of 64-bit integers, then pointers, then the number of threads."""
    fields: List[tuple] = [(each, ctypes.c_int64) for each in integers.split()]
    fields += [(each, ctypes.c_void_p) for each in pointers.split()]
    if threads:
        fields.append(("threads", ctypes.c_int))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


_Shape = _structure("Shape", "images pixels channels groups", threads=True)
_Normalization = _structure("Normalization", pointers="moments weight bias")
_Incoming = _structure("Incoming", pointers="dy kept gate pooled")
_Convolution = _structure(
    "Convolution", "images height width channels out_height out_width kernel stride top left", threads=True
)


class Norm(NamedTuple):
    """A normalisation of some input.

    moments: [N, groups, 2], of this input: mean, and one over the standard deviation. weight, bias: [C]; bias or None.
    """

    moments: torch.Tensor
    weight: torch.Tensor
    bias: Optional[torch.Tensor]

    @property
    def groups(self) -> int:
        return self.moments.shape[1]


class Gate(NamedTuple):
    """What reaches each pixel through gates and pooling: dy times `gate`, plus `pooled`, [N, C] each."""

    gate: Optional[torch.Tensor]
    pooled: torch.Tensor


class Behind(NamedTuple):
    """What follows a convolution: its output, this output's normalisation and gates, and by_group of the gradients."""

    output: torch.Tensor
    norm: Norm
    gate: Gate
    by_group: torch.Tensor


class Geometry(NamedTuple):
    """A convolution's numbers. top, left: lines and columns of padding before the image."""

    kernel: int
    stride: int
    top: int
    left: int
    out_height: int
    out_width: int


def fault() -> str:
    """Return why there are no functions on this machine, in a line; "" where there are. May compile them first."""
    if sys.version_info < (3, 9):
        return "they are not tried on Python 3.8"
    try:
        _library()
    except OSError as error:
        return printable(f"{error.filename}: {error.strerror}" if error.filename else first_line(error))
    except CompilerError as error:
        return printable(first_line(error))
    return ""


@functools.lru_cache(maxsize=None)
def _library() -> ctypes.CDLL:
    """Raises OSError, CompilerError."""
    return compilation.library(_SOURCE, _FUNCTIONS, _FLAGS)


def pixels_last(x: torch.Tensor) -> torch.Tensor:
    """Return [N, C, H, W] as a contiguous [N, H, W, C]; copied only where it is not channels-last."""
    return x.permute(0, 2, 3, 1).contiguous()


def channels_first(x: torch.Tensor) -> torch.Tensor:
    """Return [N, H, W, C] as a channels-last [N, C, H, W], without a copy."""
    return x.permute(0, 3, 1, 2)


def group_moments(x: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    """Return [N, groups, 2]: each group's mean, and one over the root of its variance plus eps.

    Source: Wu and He, 1803.08494; merged from strips of pixels as in Chan, Golub and LeVeque, 1983.
    """
    moments = torch.empty(len(x), groups, 2)
    _library().group_moments_of(_shape(x, groups), _address(x), ctypes.c_float(eps), _address(moments))
    return moments


def activated(
    x: torch.Tensor,
    norm: Norm,
    silu: bool,
    kept: Optional[torch.Tensor] = None,
    residual: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Return x normalised, activated where `silu`, times `kept`, [N], plus `residual`, like x."""
    y = torch.empty_like(x)
    _library().activate_of(
        _shape(x, norm.groups),
        int(silu),
        _address(x),
        _normalization(norm),
        _address(kept),
        _address(residual),
        _address(y),
    )
    return y


def activated_and_pooled(x: torch.Tensor, norm: Norm) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return x normalised and activated, and its means over pixels, [N, C]."""
    y = torch.empty_like(x)
    return y, _pool(x, norm, y)


def pooled(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Return means over pixels, [N, C], of x normalised and activated, which is stored nowhere."""
    return _pool(x, norm, None)


def _pool(x: torch.Tensor, norm: Norm, y: Optional[torch.Tensor]) -> torch.Tensor:
    means = torch.empty(len(x), x.shape[-1])
    _library().activate_and_pool_of(
        _shape(x, norm.groups), _address(x), _normalization(norm), _address(y), _address(means)
    )
    return means


def multiply_(y: torch.Tensor, gate: torch.Tensor) -> None:
    """Multiply y in place by `gate`, [N, C]."""
    _library().multiply_of(_shape(y, groups=1), _address(gate), _address(y))


def gradient_sums(
    form: int,
    x: torch.Tensor,
    norm: Norm,
    dy: Optional[torch.Tensor] = None,
    kept: Optional[torch.Tensor] = None,
    dz: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Return sums over pixels that the gradients of a normalisation need, [2 or 5, N, C]: see normalization.h.

    Args: dz: with PLAIN, memory for the gradient before the activation, of which `input_gradient` is LINEAR.
    """
    sums = torch.empty(_SUMS[form], len(x), x.shape[-1])
    _library().gradient_sums_of(
        _shape(x, norm.groups),
        form,
        _address(x),
        _normalization(norm),
        _incoming(dy, kept),
        _address(dz),
        _address(sums),
    )
    return sums


def merged_gradients(
    form: int, x: torch.Tensor, norm: Norm, sums: torch.Tensor, gate: Optional[Gate] = None
) -> Tuple[torch.Tensor, Optional[torch.Tensor], torch.Tensor]:
    """Return gradients of weight and bias, [C], and what the input's gradient needs of each group, [N, groups, 2]."""
    dweight = torch.empty_like(norm.weight)
    dbias = None if norm.bias is None else torch.empty_like(norm.bias)
    by_group = torch.empty_like(norm.moments)
    _library().merge_gradients_of(
        _shape(x, norm.groups),
        form,
        _address(sums),
        _address(norm.weight),
        _incoming(gate=gate),
        _address(dweight),
        _address(dbias),
        _address(by_group),
    )
    return dweight, dbias, by_group


def input_gradient(
    form: int,
    x: torch.Tensor,
    norm: Norm,
    by_group: torch.Tensor,
    dy: Optional[torch.Tensor] = None,
    kept: Optional[torch.Tensor] = None,
    gate: Optional[Gate] = None,
    out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Return the gradient of a normalisation's input. Args: out: memory for it; may be dy."""
    dx = torch.empty_like(x) if out is None else out
    _library().input_gradient_of(
        _shape(x, norm.groups),
        form,
        _address(x),
        _normalization(norm),
        _incoming(dy, kept, gate),
        _address(by_group),
        _address(dx),
    )
    return dx


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    geometry: Geometry,
    before: Optional[Norm] = None,
    groups: int = 0,
    eps: float = 0.0,
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Return a convolution of x, or of x normalised and activated, and the moments of its output.

    Args:
        weight: [C, 16, k, k].
        before: the normalisation of x, if any.
        groups, eps: of the normalisation behind; without groups there are no moments.
    """
    packed = _packed(weight, backward=False)
    y = x.new_empty(len(x), geometry.out_height, geometry.out_width, x.shape[-1])
    moments = torch.empty(len(x), groups, 2) if groups else None
    _library().convolution_of(
        _convolution(x, geometry),
        _address(x),
        _shape(x, before.groups) if before else None,
        _normalization(before) if before else None,
        _address(packed),
        _address(y),
        _shape(y, groups or 1),
        ctypes.c_float(eps),
        _address(moments),
    )
    return y, moments


def convolution_gradients(
    x: torch.Tensor,
    weight: torch.Tensor,
    geometry: Geometry,
    dy: torch.Tensor,
    before: Optional[Norm] = None,
    behind: Optional[Behind] = None,
) -> Tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor]]:
    """Return gradients of x (with `before`: of the normalised x, before its activation) and of the weights, and with
    `before` the former's sums over pixels, [2, N, C], as `gradient_sums` makes them of PLAIN.

    Args:
        dy: the gradient of the output, or of what `behind` makes of it.
        before, behind: what surrounds the convolution: nothing, `behind`, or both.
    """
    assert behind or not before, "with a normalisation before the convolution there is one behind it"
    packed = _packed(weight, backward=True)
    dx = torch.empty_like(x)
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    sums = torch.empty(2, len(x), x.shape[-1]) if before else None
    _library().convolution_gradients_of(
        _convolution(x, geometry),
        _address(x),
        _shape(x, before.groups) if before else None,
        _normalization(before) if before else None,
        _address(behind.output) if behind else None,
        _shape(behind.output, behind.norm.groups) if behind else None,
        _normalization(behind.norm) if behind else None,
        _incoming(dy, gate=behind.gate if behind else None),
        _address(behind.by_group) if behind else None,
        _address(packed),
        _address(dx),
        _address(dweight),
        _address(sums),
    )
    return dx, dweight, sums


def _packed(weight: torch.Tensor, backward: bool) -> torch.Tensor:
    """Weights of a group convolution, [C, 16, k, k], as its kernels read them, or as those of its gradient do."""
    weight = weight.contiguous()
    packed = torch.empty_like(weight)
    by = _Convolution(channels=len(weight), kernel=weight.shape[-1], stride=1, threads=torch.get_num_threads())
    _library().pack_weights_of(ctypes.byref(by), _address(weight), int(backward), _address(packed))
    return packed


def _shape(x: torch.Tensor, groups: int) -> Any:
    images, height, width, channels = x.shape
    return ctypes.byref(
        _Shape(
            images=images,
            pixels=height * width,
            channels=channels,
            groups=groups,
            threads=torch.get_num_threads(),
        )
    )


def _convolution(x: torch.Tensor, geometry: Geometry) -> Any:
    images, height, width, channels = x.shape
    return ctypes.byref(
        _Convolution(
            images=images,
            height=height,
            width=width,
            channels=channels,
            threads=torch.get_num_threads(),
            **geometry._asdict(),
        )
    )


def _normalization(norm: Norm) -> Any:
    return ctypes.byref(_Normalization(_address(norm.moments), _address(norm.weight), _address(norm.bias)))


def _incoming(
    dy: Optional[torch.Tensor] = None, kept: Optional[torch.Tensor] = None, gate: Optional[Gate] = None
) -> Any:
    gates, pooled_gradient = gate or (None, None)
    return ctypes.byref(_Incoming(_address(dy), _address(kept), _address(gates), _address(pooled_gradient)))


def _address(tensor: Optional[torch.Tensor]) -> Optional[ctypes.c_void_p]:
    if tensor is None:
        return None
    assert tensor.dtype == torch.float32 and tensor.is_contiguous(), f"{tensor.dtype}, strides {tensor.stride()}"
    return ctypes.c_void_p(tensor.data_ptr())

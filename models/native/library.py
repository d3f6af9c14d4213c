"""Our C++ functions for CPUs, on tensors: normalisation with SiLU, pooling, gates, convolutions.

Activations are float32 [N, H, W, C], contiguous: `pixels_last` of a channels-last [N, C, H, W].
Functions compute on as many threads as torch does; their results do not depend on that number.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path
from typing import Any, List, NamedTuple, Optional, Tuple, Type

import torch

from common import cpp_compiler
from common.cpp_compiler import CompilerError
from common.errors import first_line
from common.text import printable

GROUP_SIZE = 16  # channels of a convolution's group
LARGEST_KERNEL = 7

# What reaches a normalisation from above, and so which sums its gradients need: `Form` in
# normalization.h.
PLAIN, LINEAR, POOLED, GATED = range(4)
_SUMS = {PLAIN: 2, LINEAR: 2, POOLED: 2, GATED: 5}

_SOURCE = Path(__file__).parent / "library.cpp"
# Without -ffast-math, which would take NaN and infinity for impossible: a loss that is not finite
# must reach the check of gradients. Multiplying and adding in one rounds less, in a fixed way.
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
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


# The structs of normalization.h and convolution.h. A field that is left out is 0, or NULL, which
# stands for None.
_THREADS = ("threads", ctypes.c_int)


def _integers(*names: str) -> List[Tuple[str, Type[ctypes.c_int64]]]:
    """Return fields of 64 bits."""
    return [(name, ctypes.c_int64) for name in names]


def _pointers(*names: str) -> List[Tuple[str, Type[ctypes.c_void_p]]]:
    """Return fields that point to float32."""
    return [(name, ctypes.c_void_p) for name in names]


class _Shape(ctypes.Structure):
    _fields_ = [*_integers("images", "pixels", "channels", "groups"), _THREADS]


class _Normalization(ctypes.Structure):
    _fields_ = _pointers("moments", "weight", "bias")


class _Incoming(ctypes.Structure):
    _fields_ = _pointers("dy", "kept", "gate", "pooled")


class _Convolution(ctypes.Structure):
    _fields_ = [
        *_integers("images", "height", "width", "channels"),
        *_integers("out_height", "out_width"),
        *_integers("kernel", "stride", "top", "left"),
        _THREADS,
    ]


class Norm(NamedTuple):
    """A normalisation of some input.

    moments: [N, groups, 2], of this input: mean, and one over the standard deviation.
    weight, bias: [C]; bias or None.
    """

    moments: torch.Tensor
    weight: torch.Tensor
    bias: Optional[torch.Tensor]

    @property
    def groups(self) -> int:
        """Number of groups of channels."""
        return self.moments.shape[1]


class Gate(NamedTuple):
    """Numbers by which gates and pooling reach each pixel: dy * gate + pooled, [N, C] each."""

    gate: Optional[torch.Tensor]
    pooled: torch.Tensor


class Behind(NamedTuple):
    """The layers behind a convolution: its output, and this output's normalisation and gates.

    by_group: of this normalisation, from `merged_gradients`.
    """

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
    """Return why there are no functions on this machine, in a line; "" where there are.

    May compile them first.
    """
    if sys.version_info < (3, 9):
        return "they are not tried on Python 3.8"
    try:
        _library()
    except OSError as error:
        # A folder or a compiler that cannot be used has a name; a library that cannot be loaded has
        # a message of the loader's.
        if error.filename:
            return printable(f"{error.filename}: {error.strerror}")
        return printable(first_line(error))
    except CompilerError as error:
        return printable(first_line(error))
    return ""


@functools.lru_cache(maxsize=None)
def _library() -> ctypes.CDLL:
    """Return the functions, compiled if they are not in the cache.

    Raises OSError, CompilerError.
    """
    return cpp_compiler.library(_SOURCE, _FUNCTIONS, _FLAGS)


def pixels_last(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, [N, C, H, W], as a contiguous [N, H, W, C]; channels-last it is not copied."""
    return x.permute(0, 2, 3, 1).contiguous()


def channels_first(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, [N, H, W, C], as a channels-last [N, C, H, W], without a copy."""
    return x.permute(0, 3, 1, 2)


def group_moments(x: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    """Compute mean of each group, and one over the root of its variance plus eps.

    Args:
        x: [N, H, W, C].
        groups: of channels; divides C.
        eps: added to the variance.

    Returns:
        [N, groups, 2].

    Source: Wu and He, 1803.08494; merged from strips of pixels as in Chan, Golub and LeVeque, 1983.
    """
    moments = torch.empty(len(x), groups, 2)
    _library().group_moments_of(
        _shape(x, groups),
        _address(x),
        ctypes.c_float(eps),
        _address(moments),
    )
    return moments


def activated(
    x: torch.Tensor,
    norm: Norm,
    silu: bool,
    kept: Optional[torch.Tensor] = None,
    residual: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Normalise and activate, as a block's last layer.

    Args:
        x: [N, H, W, C].
        norm: of x.
        silu: apply SiLU.
        kept: [N], what an image's branch is multiplied by, or None.
        residual: like x, what is added then, or None.

    Returns:
        A tensor like x.
    """
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
    """Return `x`, [N, H, W, C], normalised and activated, and means of that over pixels, [N, C]."""
    y = torch.empty_like(x)
    return y, _pool(x, norm, y)


def pooled(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Return means over pixels, [N, C], of `x` normalised and activated, which is not stored."""
    return _pool(x, norm, None)


def _pool(x: torch.Tensor, norm: Norm, y: Optional[torch.Tensor]) -> torch.Tensor:
    """Return means over pixels, [N, C], of what is written to `y` unless that is None."""
    means = torch.empty(len(x), x.shape[-1])
    _library().activate_and_pool_of(
        _shape(x, norm.groups),
        _address(x),
        _normalization(norm),
        _address(y),
        _address(means),
    )
    return means


def multiply_(y: torch.Tensor, gate: torch.Tensor) -> None:
    """Multiply `y`, [N, H, W, C], in place by `gate`, [N, C]."""
    _library().multiply_of(_shape(y, groups=1), _address(gate), _address(y))


def gradient_sums(
    form: int,
    x: torch.Tensor,
    norm: Norm,
    dy: Optional[torch.Tensor] = None,
    kept: Optional[torch.Tensor] = None,
    dz: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Add up over pixels what the gradients of a normalisation need.

    Args:
        form: PLAIN, LINEAR, POOLED or GATED: what reaches the normalisation.
        x: [N, H, W, C].
        norm: of x.
        dy: like x; None with POOLED.
        kept: [N], what an image's branch was multiplied by, or None.
        dz: like x, with PLAIN: memory for the gradient before the activation.

    Returns:
        [2 or 5, N, C]: see `Form` in normalization.h.
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
    """Merge what `gradient_sums` returned.

    Args:
        form: PLAIN, LINEAR, POOLED or GATED: what reaches the normalisation.
        x: [N, H, W, C].
        norm: of x.
        sums: [2 or 5, N, C].
        gate: with POOLED and GATED.

    Returns:
        Gradients of weight and bias, [C] each, the second None where there is no bias; and what the
        input's gradient needs of each group, [N, groups, 2].
    """
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
    """Compute the gradient of a normalisation's input.

    Args:
        form: LINEAR, POOLED or GATED. That of PLAIN is LINEAR, with the `dz` of `gradient_sums` as
            `dy`.
        x: [N, H, W, C].
        norm: of x.
        by_group: [N, groups, 2], from `merged_gradients`.
        dy: like x; None with POOLED.
        kept: [N], what an image's branch was multiplied by, or None.
        gate: with POOLED and GATED.
        out: memory for the result; may be dy.

    Returns:
        A tensor like x.
    """
    assert form != PLAIN, "the gradient of PLAIN is that of LINEAR, by its dz"
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
    """Convolve x, or x normalised and activated.

    Args:
        x: [N, H, W, C].
        weight: [C, 16, k, k].
        geometry: of the convolution.
        before: the normalisation of x, if any.
        groups, eps: of the normalisation behind; without groups there are no moments.

    Returns:
        [N, out_height, out_width, C]; and its moments, [N, groups, 2], or None.
    """
    # NULL for a normalisation that there is not, before or behind; memory for moments is only where
    # they are wanted.
    packed = _packed(weight, backward=False)
    shape = (len(x), geometry.out_height, geometry.out_width, x.shape[-1])
    y = x.new_empty(shape)
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
    """Compute the gradients of a convolution.

    Args:
        x: [N, H, W, C].
        weight: [C, 16, k, k].
        geometry: of the convolution.
        dy: the gradient of the output, or of what `behind` makes of it.
        before, behind: what surrounds the convolution: nothing, `behind`, or both.

    Returns:
        Gradients of x, and of the weights. With `before` the first is that of the normalised x,
        before its activation; and the third result is its sums over pixels, [2, N, C], as
        `gradient_sums` makes them of PLAIN. Else that is None.
    """
    one_sided = before is not None and behind is None
    assert not one_sided, "with a normalisation before the convolution there is one behind it"
    # C++ writes the weights' gradient as [C, 16, k, k], whatever the layout of the weights is.
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
    """Return weights, [C, 16, k, k], as the convolution reads them, or as its gradient does."""
    # Packed in each pass: weights change with every update, and are few beside the activations.
    weight = weight.contiguous()
    packed = torch.empty_like(weight)
    sizes = _Convolution(
        channels=len(weight),
        kernel=weight.shape[-1],
        stride=1,
        threads=torch.get_num_threads(),
    )
    _library().pack_weights_of(
        ctypes.byref(sizes),
        _address(weight),
        int(backward),
        _address(packed),
    )
    return packed


def _shape(x: torch.Tensor, groups: int) -> Any:
    """Return a pointer to the `Shape` of x, [N, H, W, C]."""
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
    """Return a pointer to the `Convolution` of x, [N, H, W, C]."""
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
    """Return a pointer to the `Normalization`."""
    return ctypes.byref(
        _Normalization(
            moments=_address(norm.moments),
            weight=_address(norm.weight),
            bias=_address(norm.bias),
        )
    )


def _incoming(
    dy: Optional[torch.Tensor] = None,
    kept: Optional[torch.Tensor] = None,
    gate: Optional[Gate] = None,
) -> Any:
    """Return a pointer to the `Incoming`."""
    # Fields that are not given are NULL: nothing of that kind reaches the normalisation.
    incoming = _Incoming(dy=_address(dy), kept=_address(kept))
    if gate is not None:
        incoming.gate = _address(gate.gate)
        incoming.pooled = _address(gate.pooled)
    return ctypes.byref(incoming)


def _address(tensor: Optional[torch.Tensor]) -> Optional[ctypes.c_void_p]:
    """Return where a contiguous float32 tensor lies; None for None."""
    # C++ reads memory without strides: another layout would give wrong numbers, not an error.
    if tensor is None:
        return None
    plain = tensor.dtype == torch.float32 and tensor.is_contiguous()
    assert plain, f"{tensor.dtype}, strides {tensor.stride()}"
    # An address keeps nothing alive: callers hold the tensor until the call has returned.
    return ctypes.c_void_p(tensor.data_ptr())

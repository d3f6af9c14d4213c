"""Normalisation with activation for timm's blocks: group, layer (one group), batch, and proxy."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Callable, Iterator, List, Tuple, Type, TypeVar

import numpy as np
import torch
from timm import layers
from timm.models import fastvit, mlp_mixer
from torch import nn
from torch.nn import functional as F

# Points at which a proxy's moments are taken: exact to 1e-10 where weight x (1 + proxy_scale) is 1,
# to 1e-4 where it is 3.
_NODES = 32

T = TypeVar("T", bound="_FullPrecisionBuffers")


class GroupNormAct(nn.GroupNorm):
    """Group normalisation, scale and bias per channel, then SiLU or nothing; over [N, C, H, W].

    Statistics are float32 also for half-precision input. Not for channels-last input on the CPU,
    whose variance torch takes as a difference of squares. The G16 recipe uses 4 groups and eps
    1e-3.

    Args:
        channels: C.
        groups: of channels; divides C.
        eps: added to the variance.
        apply_act: apply SiLU.
        shift: have a bias.

    Source: Wu and He, 1803.08494.
    """

    def __init__(
        self,
        channels: int,
        groups: int,
        eps: float,
        apply_act: bool = True,
        shift: bool = True,
    ):
        super().__init__(groups, channels, eps=eps)
        self.apply_act = apply_act
        if not shift:
            self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised and activated `x`, [N, C, H, W]."""
        x = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        return _silu(x) if self.apply_act else x


class _FullPrecisionBuffers(nn.Module):
    """A layer whose buffers stay float32 when its model becomes half precision.

    In a float64 model they are float64.
    """

    def _apply(
        self: T,
        function: Callable[[torch.Tensor], torch.Tensor],
        recurse: bool = True,
    ) -> T:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(function)
        # From what was there before: a way through half precision would lose digits.
        for name, buffer in self.named_buffers(recurse=False):
            if buffer.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = before[name].to(buffer.device, torch.float32)
        return self


class BatchNormAct(_FullPrecisionBuffers):
    """Batch normalisation, scale and bias per channel, then SiLU or nothing; over [N, C, H, W].

    Like torch's, but statistics, and scale and bias as they are applied, are float32 also where
    input and output are half precision, and there is no `num_batches_tracked`. Every forward pass
    in training moves the running statistics (unbiased variance) by `momentum` towards the batch's.

    Args:
        channels: C.
        eps: added to the variance.
        momentum: the batch's share in the running statistics after a pass, 0 to 1.
        apply_act: apply SiLU.

    Source: Ioffe and Szegedy, 1502.03167.
    """

    running_mean: torch.Tensor  # [C], float32
    running_var: torch.Tensor  # [C], float32

    def __init__(self, channels: int, eps: float, momentum: float, apply_act: bool = True):
        super().__init__()
        self.eps = eps
        self.momentum = momentum
        self.apply_act = apply_act
        self.moves_statistics = True  # False where a pass is computed for the second time
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised and activated `x`, [N, C, H, W].

        Raises:
            ValueError: torch's, for one value per channel in training: it would have no variance.
        """
        # Scale and bias in the statistics' dtype: batch_norm takes them together, also for
        # half-precision input.
        weight = self.weight.to(self.running_mean.dtype)
        bias = self.bias.to(self.running_mean.dtype)
        mean = self.running_mean
        variance = self.running_var
        if not self.moves_statistics:
            # batch_norm writes into what it is given.
            mean = mean.clone()
            variance = variance.clone()
        x = F.batch_norm(
            x,
            mean,
            variance,
            weight=weight,
            bias=bias,
            training=self.training,
            momentum=self.momentum,
            eps=self.eps,
        )
        return _silu(x) if self.apply_act else x


class ProxyNormAct(_FullPrecisionBuffers, GroupNormAct):
    """Group normalisation, scale and bias, SiLU, and then proxy normalisation; over [N, C, H, W].

    It takes off the mean and scale that a Gaussian Y in the place of a channel's normalised values
    would have:

        Y ~ N(proxy_shift, (1 + proxy_scale)^2)
        output = (silu(weight y + bias) - mean) / sqrt(variance + proxy_eps)
        mean, variance: those of silu(weight Y + bias)

    `proxy_shift` and `proxy_scale`, [C], are learnt and start at 0; gradients reach weight and bias
    through the moments too. The moments and their use are float32: in float16 sums over pixels in
    their gradients would overflow.

    Args:
        channels: C.
        groups: of channels; divides C.
        eps: added to the variance of a group.
        proxy_eps: added to the variance of a proxy.

    Source: Labatie et al., 2106.03743; used by Masters et al., 2106.03640. As in the authors' code
    (graphcore/examples v3.0.0, proxy_norm.py), a layer without activation has no proxy and no bias.
    Our choices: moments by Gauss-Hermite quadrature instead of 200 quantiles, which are off by up
    to 1 %; and division by the standard deviation also in the network's head.
    """

    nodes: torch.Tensor  # [nodes], where a standard normal variable is taken
    shares: torch.Tensor  # [nodes], weights of the quadrature; they sum up to 1

    def __init__(self, channels: int, groups: int, eps: float, proxy_eps: float):
        super().__init__(channels, groups, eps)
        self.proxy_eps = proxy_eps
        self.proxy_shift = nn.Parameter(torch.zeros(channels))
        self.proxy_scale = nn.Parameter(torch.zeros(channels))
        # Constants, so they are not in the state dict: a file of weights does not depend on them.
        nodes, shares = np.polynomial.hermite_e.hermegauss(_NODES)
        shares = shares / shares.sum()
        self.register_buffer("nodes", torch.tensor(nodes.tolist()), persistent=False)
        self.register_buffer("shares", torch.tensor(shares.tolist()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised, activated and again normalised `x`, [N, C, H, W]."""
        mean, variance = self.moments()
        scale = (variance + self.proxy_eps).rsqrt()
        # (z - mean) * scale as z * scale + shift: one pass over the pixels.
        shift = -mean * scale
        z = super().forward(x)
        # A number of each channel for all of its pixels: [C, 1, 1].
        shift = shift.view(-1, 1, 1)
        scale = scale.view(-1, 1, 1)
        return torch.addcmul(shift, z, scale).to(z.dtype)

    def moments(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return mean and variance of each channel's proxy after SiLU, [C] each, float32."""
        dtype = self.nodes.dtype
        weight = self.weight.to(dtype)[:, None]
        bias = self.bias.to(dtype)[:, None]
        shift = self.proxy_shift.to(dtype)[:, None]
        scale = self.proxy_scale.to(dtype)[:, None]
        # The proxy at the nodes of the quadrature, [C, nodes].
        y = shift + (1 + scale) * self.nodes
        z = F.silu(weight * y + bias)
        # A sum and no matrix product: that may be rounded to 10 bits (TF32).
        mean = (z * self.shares).sum(1)
        deviation = z - mean[:, None]
        return mean, (deviation.square() * self.shares).sum(1)


def _silu(x: torch.Tensor) -> torch.Tensor:
    # In place only where no gradient needs what SiLU is given.
    return F.silu(x, inplace=not torch.is_grad_enabled())


def _newer_layer_scales() -> Iterator[Type[nn.Module]]:
    """Yield those of models that not all of timm's releases that we can use have.

    A `Residual` of iFormer has no parameter of its own but the scale of its branch.
    """
    for model, name in (("swiftformer", "LayerScale2d"), ("iformer", "Residual")):
        if importlib.util.find_spec(f"timm.models.{model}"):
            yield getattr(importlib.import_module(f"timm.models.{model}"), name)


# The layers whose parameters an optimizer may treat on their own: ours, torch's, and those of
# timm's models. A layer scale multiplies channels as a norm's scale does.
NORMS = (
    nn.GroupNorm,
    nn.LayerNorm,
    BatchNormAct,
    layers.RmsNorm,
    layers.SimpleNorm,
    layers.LayerScale,
    layers.LayerScale2d,
    fastvit.LayerScale2d,
    mlp_mixer.Affine,
    *_newer_layer_scales(),
)


def norm_parameters(model: nn.Module) -> List[str]:
    """Return names of the parameters of `model` that count as those of normalisation layers.

    These are the layers' own, and all of at most one dimension: timm's models have many a scale
    that is in no layer of its own. Biases among them count as biases nevertheless (`optim.factory`).

    Source: `param_groups_weight_decay` of timm, which has no weight decay for one dimension.
    """
    names = []
    for prefix, module in model.named_modules():
        is_norm = isinstance(module, NORMS)
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if is_norm or parameter.dim() <= 1:
                names.append(name)
    return names

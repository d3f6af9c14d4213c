"""Muon: the momentum of each hidden layer's weights, made orthogonal; AdamW for all others."""

from __future__ import annotations

import contextlib
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    NoReturn,
    Optional,
    Sequence,
    Set,
    Tuple,
    overload,
)

import torch
from torch import nn
from torch.optim.adamw import adamw

from optim.base import OPTIMIZERS, HasSlots
from recipe import optimization

# p(s) = a s + b s^3 + c s^5, which a Newton-Schulz step makes of each singular value s. Repeated,
# it lifts small values as steeply as is possible (a per step) and leaves the others near 1, without
# converging to it.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7  # matrices of a smaller norm are not scaled up to 1
RMS = 0.2  # root mean square of a step's elements at rate 1, about that of AdamW's steps


class AdamWNumbers(NamedTuple):
    """Numbers of AdamW's steps within Muon.

    lr_scale: factor on Muon's rate.
    betas: decays of the averages of gradients and of their squares.
    eps: added to the divisor of the steps.
    """

    lr_scale: float = 1.0
    betas: Tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8


_ADAMW = AdamWNumbers()


@OPTIMIZERS.implements(optimization.Muon)
class Muon(HasSlots):
    """Momentum whose matrices are made orthogonal, for the weights of hidden layers.

    With mu = `momentum`, wd = `weight_decay` and a weight as a matrix [rows, columns]:

        m = mu m + (1 - mu) g;  d = mu m + (1 - mu) g, or without `nesterov` d = m
        w = (1 - lr wd) w - lr 0.2 sqrt(max(rows, columns)) orthogonalized(d)

    An orthogonal matrix's elements have a root mean square of 1 / sqrt(max(rows, columns)). The
    factor makes that 0.2, as AdamW's steps have it about, so that rates and weight decays found for
    AdamW are of use here.

    A convolution's weight [out, in, height, width] is the matrix [out, in x height x width]. One in
    groups is a block-diagonal matrix, and the matrix of each group is made orthogonal on its own:
    the norm of the whole is the largest norm of its blocks, and the steepest descent under that
    norm is that of each block.

    All other parameters take AdamW's steps, at `adamw.lr_scale` times the rate: biases,
    normalisations, the first and the last layer, depthwise convolutions
    (`optim.factory.hidden_layers`). `exp_avg` is m for both kinds of parameters; `exp_avg_sq` of a
    matrix is not used.

    Everything is float32. On a CPU the products of matrices are computed by one thread, because a
    library that shares them among threads may add in another order for another number of threads.
    All replicas make the update, each for itself: different bits would let their weights drift
    apart.

    Sources: Jordan et al., 2024, Muon (kellerjordan.github.io/posts/muon); the factor: Liu et al.,
    2502.16982, section 2.2 (`match_rms_adamw` of torch and timm); AdamW: torch's.
    """

    slots = optimization.Muon.all_slots

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        weight_decay: float = 0.1,
        adamw: AdamWNumbers = _ADAMW,
    ):
        """
        Args:
            params: tensors, or groups with their own `weight_decay` and `matrices`: into how many
                matrices of consecutive rows each of its weights is divided; 0, the default: AdamW
                steps these.
            lr: learning rate.
            momentum: decay of the average of the gradients of matrices.
            nesterov: look one step ahead along the average.
            ns_steps: Newton-Schulz steps.
            weight_decay: of both kinds of parameters, times the rate.
            adamw: of the parameters that are no matrices.
        """
        defaults = {"lr": lr, "weight_decay": weight_decay, "matrices": 0}
        super().__init__(params, defaults)
        # Numbers that all parameters share are no options of groups.
        self._momentum = momentum
        self._nesterov = nesterov
        self._ns_steps = ns_steps
        self._adamw = adamw

    @classmethod
    def of(cls, section: optimization.Muon, groups: List[Dict[str, Any]]) -> Muon:
        """Return Muon with the numbers of `section`."""
        return cls(
            groups,
            lr=0.0,
            momentum=section.momentum,
            nesterov=section.nesterov,
            ns_steps=section.ns_steps,
            adamw=AdamWNumbers(
                lr_scale=section.adamw_lr_scale,
                betas=(section.beta1, section.beta2),
                eps=section.eps,
            ),
        )

    @classmethod
    def groups(
        cls,
        section: optimization.Muon,
        parameters: Mapping[str, nn.Parameter],
        skipped: Set[str],
        hidden: Mapping[str, int],
    ) -> List[Dict[str, Any]]:
        """Return the groups of HasSlots, and one for the hidden layers of each number of matrices.

        Args:
            section: of the recipe.
            parameters: by name.
            skipped: names of parameters without weight decay and adaptation: see HasSlots.
            hidden: number of matrices of each hidden layer, by name.
        """
        # Layers with the same number of matrices share a group, whose option that number is.
        matrices: Dict[int, List[nn.Parameter]] = {}
        others: Dict[str, nn.Parameter] = {}
        for name, parameter in parameters.items():
            if name in hidden and name not in skipped:
                matrices.setdefault(hidden[name], []).append(parameter)
            else:
                others[name] = parameter
        groups = []
        for number, layers in matrices.items():
            decay = section.weight_decay
            groups.append({"params": layers, "matrices": number, "weight_decay": decay})
        return groups + super().groups(section, others, skipped, hidden)

    def at_step(self, index: int) -> None:
        """Set the count of each parameter, for AdamW's steps, to `index`."""
        # Also of matrices, which do not use it: the group need not be asked.
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] = torch.tensor(float(index))

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> NoReturn: ...

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], float]] = None) -> None:
        """Update all parameters that have gradients, without waiting for the device.

        Gradients are read and never written.

        Args:
            closure: None. torch's interface has it, for optimizers that evaluate the loss again.
        """
        assert closure is None
        for group in self.param_groups:
            trained = []
            for parameter in group["params"]:
                if parameter.grad is not None:
                    trained.append(_Trained(parameter, parameter.grad))
            if not trained:
                continue
            self._create_state(trained)
            if not group["matrices"]:
                self._step_by_adamw(group, trained)
                continue
            # One thread, so that all replicas get the same bits: see the class.
            with _one_thread(trained[0].parameter.device):
                for layer in trained:
                    self._step_matrices(group, layer)

    def _create_state(self, trained: Sequence[_Trained]) -> None:
        """Begin the state of parameters that have none; WeightState gives them theirs."""
        for parameter, _ in trained:
            state = self.state[parameter]
            if "step" not in state:
                state["step"] = torch.tensor(0.0)
            for slot in self.slots:
                if slot not in state:
                    state[slot] = torch.zeros_like(parameter)

    def _step_matrices(self, group: Mapping[str, Any], layer: _Trained) -> None:
        """Step a weight of a hidden layer, which is so many matrices."""
        weight, gradient = layer
        average = self.state[weight]["exp_avg"]
        average.lerp_(gradient, 1 - self._momentum)
        direction = gradient.lerp(average, self._momentum) if self._nesterov else average

        # [matrices, rows, columns]: groups of a convolution are consecutive output channels.
        rows = len(weight) // group["matrices"]
        matrices = direction.reshape(group["matrices"], rows, -1)
        step = orthogonalized(matrices, self._ns_steps).reshape(weight.shape)

        # The decay comes first: it is of the weights before the step, as in AdamW.
        factor = RMS * max(matrices.shape[1:]) ** 0.5
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(step, alpha=-group["lr"] * factor)

    def _step_by_adamw(self, group: Mapping[str, Any], trained: Sequence[_Trained]) -> None:
        """Step parameters that are no matrices of hidden layers."""
        # By torch's function: a second optimizer would keep a state that nothing saves.
        states = [self.state[parameter] for parameter, _ in trained]
        adamw(
            [parameter for parameter, _ in trained],
            [gradient for _, gradient in trained],
            exp_avgs=[state["exp_avg"] for state in states],
            exp_avg_sqs=[state["exp_avg_sq"] for state in states],
            max_exp_avg_sqs=[],
            state_steps=[state["step"] for state in states],
            foreach=group.get("foreach"),
            amsgrad=False,
            beta1=self._adamw.betas[0],
            beta2=self._adamw.betas[1],
            lr=group["lr"] * self._adamw.lr_scale,
            weight_decay=group["weight_decay"],
            eps=self._adamw.eps,
            maximize=False,
        )


class _Trained(NamedTuple):
    """A parameter that has a gradient, and this gradient, of the same shape."""

    parameter: nn.Parameter
    gradient: torch.Tensor


def orthogonalized(matrices: torch.Tensor, steps: int) -> torch.Tensor:
    """Return matrices with the singular vectors of the given ones, and singular values near 1.

    A singular value s becomes p(p(...(s / norm))), with p of COEFFICIENTS and the Frobenius norm of
    its matrix. Five steps bring what is above 1 % of the norm to between 0.68 and 1.14. Zeros stay
    zeros. The norm is exact to float32 rounding, whatever the finite values are.

    Args:
        matrices: float32 or float64 [number, rows, columns].
        steps: Newton-Schulz steps, 1 or more.

    Returns:
        The same shape and dtype.

    Source: Jordan et al., 2024, Muon, whose products are of bfloat16 numbers; here they are of the
    given dtype.
    """
    # Turned so that the product with the transpose is the smaller one of both.
    turned = matrices.size(1) > matrices.size(2)
    wide = matrices.mT if turned else matrices
    # float64 has the squares of all float32 numbers.
    squares = wide.double().square()
    norms = squares.sum((1, 2), keepdim=True).sqrt()
    # No singular value is above the Frobenius norm: all are now in [0, 1], where p lifts them.
    x = (wide / norms.clamp(min=SMALLEST_NORM)).to(matrices.dtype)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        # a x + (b G + c G^2) x with G = x x^T: the odd polynomial p acts on the singular values
        # alone, without a decomposition.
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if turned else x


@contextlib.contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """A context in which torch computes on a CPU with one thread."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

"""The optimizers: attributes and state as PopTorch 3.4's python/optim.py has them, and the update
on the device.

Forms that the product does not use are missing: SGD has an accumulator of its own, RMSprop is
TensorFlow's. Arithmetic is float32 but where PopART holds a result in the weight's or the state's
dtype. Sources: PopART 3.4, willow/include/popart/adam.hpp, sgd.hpp, adaptive.hpp;
willow/src/popx/op/adamupdaterx.cpp, adamvarupdatex.cpp, accumulatex.cpp, rmspropupdaterx.cpp. State
is named as in willow/include/popart/tensornames.hpp.
"""

import inspect

import torch
from signatures import poptorch

NAMES = ("SGD", "RMSprop", "LAMB")  # of those that PopTorch takes, the ones of the double
PREFIXES = ("Accl1___", "Accl2___", "Accl3___", "Step___")
_MOMENTS = ("first_order_momentum_accum_type", "second_order_momentum_accum_type")
_TYPES = ("accum_type", "velocity_accum_type", *_MOMENTS)
_KNOWN = {
    "params",
    "loss_scaling",
    "bias_correction",
    "use_combined_accum",
    "use_tf_variant",
    *_TYPES,
}


def nearest(values, dtype):
    """Rounds to the nearest of dtype, ties to even."""
    return values.to(dtype)


def stochastic(values, dtype):
    """Rounds float32 to one of the two neighbours in float16, right on average; torch's generator
    draws."""
    if dtype == torch.float32:
        return values.clone()
    _, exponent = torch.frexp(values)
    # Eleven significant bits; below 2^-14 the spacing of float16 stays 2^-24.
    spacing = torch.ldexp(torch.ones_like(values), (exponent - 11).clamp(min=-24))
    return ((values / spacing + torch.rand_like(values)).floor() * spacing).to(dtype)


def _set(target, values, rounded):
    target.copy_(rounded(values, target.dtype))


class VariableAttributes:
    """Attributes that may change after compilation: those that the constructor was given, not those
    of groups only."""

    def __init__(self, names, allowed):
        self.names = set(names)
        self._allowed = allowed

    def markAsConstant(self, attr):
        assert attr in self._allowed, f"Unknown attribute {attr}, allowed values: {self._allowed}"
        self.names.discard(attr)


class Optimizer(torch.optim.Optimizer):
    """State of the device's optimizer as the host knows it: {"ipu_state": {name: tensor},
    "ipu_param": {...}}.

    device_state: a weak reference to what reads it. loaded: a state that has not reached the device
    yet. new_state(values, weight): {prefix: tensor} of a parameter before the first update.
    update(values, weight, gradient, state, rounded): changes weight and state in place; gradient:
    float32, without loss scale and counts. values: {name: number} of the parameter's group.
    rounded: nearest or stochastic.
    """

    defaults_of_groups = {}

    def __init__(self, *args, **kwargs):
        name = next(each.__name__ for each in type(self).__mro__ if each.__name__ in NAMES)
        stub = getattr(poptorch.optim, name).__init__
        arguments = inspect.signature(stub).bind(self, *args, **kwargs).arguments
        given = {
            name: value for name, value in arguments.items() if name != "self" and value is not None
        }
        missing = set(given) - _KNOWN - {"lr", *self.defaults_of_groups}
        assert not missing, f"the double does not know {missing}"
        assert not given.get("use_combined_accum") and given.get("use_tf_variant", True)
        groups = {
            name: given.get(name, value)
            for name, value in {"lr": 1e-3, **self.defaults_of_groups}.items()
        }
        super().__init__(given["params"], groups)
        assert isinstance(groups.get("betas", ()), tuple), "Expected a pair for betas"
        self.loss_scaling = given.get("loss_scaling", 1.0)
        self.bias_correction = given.get("bias_correction", True)
        self.types = {name: given.get(name, torch.float32) for name in _TYPES}
        self.variable_attrs = VariableAttributes(given, [*groups, "loss_scaling"])
        self.device_state = self.loaded = None

    def state_dict(self):
        """The device's state and torch's own; None in the place of state that does not exist
        yet."""
        read = self.device_state and self.device_state()
        state = self.loaded or {"ipu_state": read and read(), "ipu_param": {}}
        return {**state, **super().state_dict()}

    def load_state_dict(self, state):
        """Takes a state; it reaches the device when the executor next runs, attaches, or is given
        the optimizer."""
        if "ipu_state" not in state or "ipu_param" not in state:
            raise RuntimeError("Only IPU optimizer states can be loaded onto the IPU.")
        super().load_state_dict(state)
        self.loaded = state


class SGD(Optimizer):
    defaults_of_groups = {"momentum": 0.0, "weight_decay": 0.0}

    def new_state(self, values, weight):
        dtype = self.types["velocity_accum_type"]
        return {"Accl1___": torch.zeros_like(weight, dtype=dtype)} if values["momentum"] else {}

    def update(self, values, weight, gradient, state, rounded):
        step = gradient + values["weight_decay"] * weight.float()
        if "Accl1___" in state:  # larger by the loss scale
            velocity = state["Accl1___"]
            _set(
                velocity, velocity.float() * values["momentum"] + self.loss_scaling * step, rounded
            )
            step = velocity.float() / self.loss_scaling
        _set(weight, weight.float() - values["lr"] * step, rounded)


class RMSprop(Optimizer):
    defaults_of_groups = {"alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0}

    def new_state(self, values, weight):
        momentum = (
            {"Accl3___": torch.zeros_like(weight, dtype=torch.float32)}
            if values["momentum"]
            else {}
        )
        return {"Accl1___": torch.ones_like(weight, dtype=self.types[_MOMENTS[0]]), **momentum}

    def update(self, values, weight, gradient, state, rounded):
        gradient = gradient + values["weight_decay"] * weight.float()
        alpha = values["alpha"]
        square = state["Accl1___"]
        _set(square, alpha * square.float() + (1.0 - alpha) * gradient * gradient, rounded)
        update = values["lr"] * (gradient / (square.float() + values["eps"]).sqrt())
        if "Accl3___" in state:
            update = state["Accl3___"].copy_(values["momentum"] * state["Accl3___"] + update)
        _set(weight, weight.float() - update, rounded)


class LAMB(Optimizer):
    defaults_of_groups = {
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-2,
        "max_weight_norm": 65500.0,
    }

    def new_state(self, values, weight):
        count = {"Step___": torch.zeros(())} if self.bias_correction else {}
        first, second = (torch.zeros_like(weight, dtype=self.types[name]) for name in _MOMENTS)
        return {"Accl1___": first, "Accl2___": second, **count}

    def update(self, values, weight, gradient, state, rounded):
        narrow = weight.dtype
        (beta1, beta2) = values["betas"]
        first = state["Accl1___"]
        second = state["Accl2___"]
        _set(first, beta1 * first.float() + (1.0 - beta1) * gradient, rounded)
        _set(second, beta2 * second.float() + (1.0 - beta2) * gradient * gradient, rounded)
        mean = first.float()
        square = second.float()
        if "Step___" in state:
            state["Step___"] += 1
            mean = mean / (1.0 - beta1 ** state["Step___"])
            square = square / (1.0 - beta2 ** state["Step___"])
        # The first moment takes the second's type, then the quotient, the decay and their sum the
        # weight's.
        mean = rounded(mean, second.dtype).float()
        update = rounded(mean / (square.sqrt() + values["eps"]), narrow).float()
        if values["weight_decay"]:
            decay = rounded(values["weight_decay"] * weight.float(), narrow).float()
            update = rounded(update + decay, narrow).float()
        step = values["lr"] * _trust(values["max_weight_norm"], weight.float(), update)
        _set(weight, weight.float() - step * update, rounded)


def _trust(max_weight_norm, weight, update):
    """min(||w||, max) / ||u||; 1 where any of the three is 0
    (willow/src/patterns/adamdecompose.cpp)."""
    weight_square = weight.square().sum()
    update_square = update.square().sum()
    if max_weight_norm == 0 or weight_square == 0 or update_square == 0:
        return 1.0
    return weight_square.sqrt().clamp(max=max_weight_norm) / update_square.sqrt()

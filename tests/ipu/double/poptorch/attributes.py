"""What the device is told about an optimizer, and which changes it accepts afterwards.

Sources: PopTorch 3.4, python/_optimizer_attributes.py; PopART 3.4, willow/src/adam.cpp, optimizervalue.cpp.
"""

import numbers

import torch

from . import optim
from .errors import Error, logger

_TYPES = ("SGD1", "SGD2", "ADAM", "ADAMW", "ADAMW_NO_BIAS", "RMSPROP", "RMSPROP_CENTERED", "LAMB", "LAMB_NO_BIAS")

# Where an optimizer of torch's says nothing of constants, these values are constant.
_CONSTANT_AT = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "eps": 1e-8, "loss_scaling": 1.0}

# Names in PopART's refusals (willow/src/adam.cpp, Adam::validReplacement).
_IN_ERRORS = {
    "lr": "learning rates",
    "weight_decay": "weight decays",
    "beta1": "beta1s",
    "beta2": "beta2s",
    "eps": "eps",
    "max_weight_norm": "mwn",
    "loss_scaling": "loss scaling",
    "momentum": "momentums",
    "dampening": "dampenings",
    "alpha": "alphas",
}


class Settings:
    """Snapshot of an optimizer.

    Attributes:
        kind: one of PopTorch's types of optimizer.
        globals: {name: value}, among them accumulator types.
        loss_scaling: (value, constant).
        groups: one {name: (value, constant)} for each parameter group; betas split into beta1 and beta2.
    """

    def __init__(self, optimizer):
        self.kind = _kind(optimizer)
        owner = {"S": optim.SGD, "R": optim.RMSprop, "L": optim.LAMB}[self.kind[0]]
        variables = getattr(optimizer, "variable_attrs", None)
        self.loss_scaling = _pair(variables, "loss_scaling", getattr(optimizer, "loss_scaling", 1.0))
        self.globals = {name: _global(optimizer, name) for name in owner._child_only if name not in owner._group_vars}
        self.groups = [_group(owner, variables, group) for group in optimizer.param_groups]
        self.parameters = [list(group["params"]) for group in optimizer.param_groups]

    def __eq__(self, other):
        same = ("kind", "globals", "loss_scaling", "groups")
        return isinstance(other, Settings) and all(getattr(self, name) == getattr(other, name) for name in same)

    def check_replaces(self, old):
        """Error where a compiled `old` cannot become this: another kind, or a constant that would change."""
        if self.kind != old.kind:
            raise Error("Adam modes do not match")
        pairs = [("loss_scaling", old.loss_scaling, self.loss_scaling)]
        for before, after in zip(old.groups, self.groups):
            pairs += [(name, before[name], after[name]) for name in before]
        for name, (value, constant), (new_value, new_constant) in pairs:
            if constant != new_constant:
                fault = "Can not replace a constant value with a non constant value."
            elif constant and value != new_value:
                fault = "Values are constant but do not match."
            else:
                continue
            raise Error(f"Problem with {_IN_ERRORS.get(name, name)}. {fault}")

    def check_values(self):
        """Error where PopART takes a value for a slip of the user's."""
        for group in self.groups:
            rate, constant = group["lr"]
            if rate < 0:
                raise Error(f"Negative learning rate ({rate}) in Adam, bailing as this might be a user error.")
            if rate == 0 and constant:
                raise Error("Constant, zero learning rate in Adam, bailing as this might be a user error.")
            if group["weight_decay"][0] < 0:
                raise Error(
                    f"Negative weight decay ({group['weight_decay'][0]}), bailing as this might be a user error"
                )
            for name in ("beta1", "beta2"):
                if group.get(name, (0.0, True))[0] < 0:
                    raise Error(f"Negative {name} ({group[name][0]}) in Adam, bailing as this might be a user error")
            if group.get("eps", (1.0, True))[0] <= 0:
                raise Error(f"Non-positive eps ({group['eps'][0]}) in Adam is not supported")


class AttributeTracker:
    """Warns once of attributes that a later optimizer or group has and the first had not."""

    def __init__(self):
        self._known = None
        self._said = set()

    def check(self, optimizer):
        """Learns the attributes at the first call, compares at later ones."""
        seen = [("optimizer attribute", [name for name in optimizer.__dict__ if name not in _NOT_ATTRIBUTES])]
        for number, group in enumerate(optimizer.param_groups):
            seen.append((f"group {number} attribute", [name for name in group if name != "params"]))
        if self._known is None:
            self._known = {name for _, names in seen for name in names}
            return
        for kind, names in seen:
            extra = [name for name in names if name not in self._known]
            if extra and (kind, tuple(extra)) not in self._said:
                self._said.add((kind, tuple(extra)))
                logger.warning("Ignoring unexpected %s in %s optimizer: %s", kind, _kind(optimizer), extra)


_NOT_ATTRIBUTES = ("defaults", "state", "param_groups", "variable_attrs")


def _kind(optimizer):
    bases = type(optimizer).__bases__
    if torch.optim.Optimizer not in bases and optim.Optimizer not in bases:
        logger.warning(
            "Optimizer `%s` subclassed from classes in poptorch.optim or torch.optim are unlikely to behave as "
            "intended. Poptorch does not run Python optimizer code directly; but instead uses IPU native optimisers "
            "implemented in PopART.",
            type(optimizer).__name__,
        )
    if isinstance(optimizer, torch.optim.SGD):
        return "SGD1" if getattr(optimizer, "use_combined_accum", False) else "SGD2"
    if isinstance(optimizer, torch.optim.RMSprop):
        centered = optimizer.param_groups[0]["centered"]
        assert all(group["centered"] == centered for group in optimizer.param_groups), (
            "All parameter groups must have the same value for the 'centered' attribute"
        )
        return "RMSPROP_CENTERED" if centered else "RMSPROP"
    if isinstance(optimizer, optim.LAMB):
        return "LAMB" if optimizer.bias_correction else "LAMB_NO_BIAS"
    raise AssertionError(f"Unsupported optimizer type. Types supported {', '.join(_TYPES)}")


def _global(optimizer, name):
    if name.endswith("_type"):
        dtype = getattr(optimizer, name, torch.float32)
        if dtype not in (torch.float16, torch.float32):
            raise ValueError(f"{name} must be set to either torch.float16 or torch.float32 not {dtype}")
        return dtype
    return getattr(optimizer, name, None)


def _group(owner, variables, group):
    values = {}
    for name in owner._group_vars:
        if name in ("nesterov", "centered"):
            values[name] = (bool(group[name]), True)
            continue
        if name == "velocity_scaling":
            continue
        assert group.get(name) is not None, f"Mandatory attribute {name} not found in optimizer group"
        if name == "betas":
            values.update(_betas(variables, group["betas"]))
        else:
            values[name] = _pair(variables, name, group[name])
    return values


def _betas(variables, betas):
    assert isinstance(betas, tuple) and len(betas) == 2, f"Expected a pair for betas but got {betas} instead"
    constant = _pair(variables, "betas", 0.0)[1]
    return {name: (_single(name, value), constant) for name, value in zip(("beta1", "beta2"), betas)}


def _pair(variables, name, value):
    """(value as float32, whether it is constant)."""
    if variables is not None:
        constant = variables.isConstant(name)
    else:
        constant = name not in ("lr",) and value == _CONSTANT_AT.get(name, value)
    return _single(name, value), constant


def _single(name, value):
    assert isinstance(value, numbers.Number), f"Expected a number for {name} but got {value} instead"
    return torch.tensor(float(value), dtype=torch.float32).item()

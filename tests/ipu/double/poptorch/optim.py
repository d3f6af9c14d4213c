"""The optimizers' Python side: attributes and state, no arithmetic (PopTorch 3.4, python/optim.py).

Forms that the product does not use are missing: SGD has an accumulator of its own, RMSprop is TensorFlow's.
"""

import inspect

import torch
from signatures import poptorch

_MOMENTS = ("first_order_momentum_accum_type", "second_order_momentum_accum_type")
_TYPES = ("accum_type", "velocity_accum_type", *_MOMENTS)
_KNOWN = {"params", "loss_scaling", "bias_correction", "use_combined_accum", "use_tf_variant", *_TYPES}


class VariableAttributes:
    """Attributes that may change after compilation: those that the constructor was given, not those of groups only."""

    def __init__(self, names, allowed):
        self.names, self._allowed = set(names), allowed

    def markAsConstant(self, attr):
        """Refuses later changes of an attribute."""
        assert attr in self._allowed, f"Unknown attribute {attr}, allowed values: {self._allowed}"
        self.names.discard(attr)


class Optimizer(torch.optim.Optimizer):
    """State of the device's optimizer as the host knows it: {"ipu_state": {name: tensor}, "ipu_param": {...}}.

    device_state: a weak reference to what reads it. loaded: a state that has not reached the device yet.
    """

    defaults_of_groups = {}

    def __init__(self, *args, **kwargs):
        stub = getattr(poptorch.optim, type(self).__name__).__init__
        arguments = inspect.signature(stub).bind(self, *args, **kwargs).arguments
        given = {name: value for name, value in arguments.items() if name != "self" and value is not None}
        missing = set(given) - _KNOWN - {"lr", *self.defaults_of_groups}
        assert not missing, f"the double does not know {missing}"
        assert not given.get("use_combined_accum") and given.get("use_tf_variant", True)
        groups = {name: given.get(name, value) for name, value in {"lr": 1e-3, **self.defaults_of_groups}.items()}
        super().__init__(given["params"], groups)
        assert isinstance(groups.get("betas", ()), tuple), "Expected a pair for betas"
        self.loss_scaling = given.get("loss_scaling", 1.0)
        self.bias_correction = given.get("bias_correction", True)
        self.types = {name: given.get(name, torch.float32) for name in _TYPES}
        self.variable_attrs = VariableAttributes(given, [*groups, "loss_scaling"])
        self.device_state = self.loaded = None

    def state_dict(self):
        """The device's state and torch's own; None in the place of state that does not exist yet."""
        read = self.device_state and self.device_state()
        state = self.loaded or {"ipu_state": read and read(), "ipu_param": {}}
        return {**state, **super().state_dict()}

    def load_state_dict(self, state):
        """Takes a state; it reaches the device when the executor next runs, attaches, or is given the optimizer."""
        if "ipu_state" not in state or "ipu_param" not in state:
            raise RuntimeError("Only IPU optimizer states can be loaded onto the IPU.")
        super().load_state_dict(state)
        self.loaded = state


class SGD(Optimizer):
    """Gradient descent with momentum in a tensor of its own."""

    defaults_of_groups = {"momentum": 0.0, "weight_decay": 0.0}


class RMSprop(Optimizer):
    """As TensorFlow has it."""

    defaults_of_groups = {"alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0}


class LAMB(Optimizer):
    """Layer-wise adaptive moments (1904.00962)."""

    defaults_of_groups = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "max_weight_norm": 65500.0}

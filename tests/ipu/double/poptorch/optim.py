"""The optimizers' Python side: attributes and state, no arithmetic (PopTorch 3.4, python/optim.py)."""

import torch

from .errors import logger

_HALF_OR_FLOAT = (torch.float16, torch.float32)


class VariableAttributes:
    """Which attributes may change after compilation: those that the constructor was given."""

    def __init__(self, variable_attributes, allowed_attributes):
        self._variable_attributes = variable_attributes
        self._allowed_attributes = allowed_attributes

    def isConstant(self, attr):
        """Whether changes of attr are refused."""
        return attr not in self._variable_attributes

    def markAsConstant(self, attr):
        """Refuses changes of attr."""
        self._check(attr)
        self._variable_attributes = [name for name in self._variable_attributes if name != attr]

    def markAsVariable(self, attr):
        """Permits changes of attr."""
        self._check(attr)
        self._variable_attributes.append(attr)

    def _check(self, attr):
        assert attr in self._allowed_attributes, f"Unknown attribute {attr}, allowed values: {self._allowed_attributes}"


class Optimizer:
    """State of the device's optimizer as the host knows it: {"ipu_state": {name: tensor}, "ipu_param": {...}}."""

    _global = ()

    def __init__(self):
        self._state_dict = {"ipu_state": None, "ipu_param": None}
        self.ipu_state_is_dirty = False
        self.host_state_is_dirty = False

    def state_dict(self):
        """Both of the above and torch's own state; an executor replaces this by one that reads the device first."""
        return self.get_state_dict()

    def get_state_dict(self):
        """What the host has, without asking the device."""
        return {**self._state_dict, **torch.optim.Optimizer.state_dict(self)}

    def load_state_dict(self, state):
        """Takes a state; it reaches the device when the executor next runs, compiles or attaches."""
        torch.optim.Optimizer.load_state_dict(self, state)
        self.set_state_dict(state)

    def set_state_dict(self, state):
        """Takes the device's part of a state; RuntimeError where there is none."""
        if not state:
            raise RuntimeError("Cannot load optimizer state dictionary because it is empty.")
        if "ipu_state" not in state or "ipu_param" not in state:
            raise RuntimeError("Only IPU optimizer states can be loaded onto the IPU.")
        self._state_dict = state
        self.ipu_state_is_dirty = True
        self.host_state_is_dirty = False

    def has_state(self):
        """Whether a state was loaded or read."""
        return self._state_dict.get("ipu_state") is not None and self._state_dict.get("ipu_param") is not None

    def __getstate__(self):
        state = super().__getstate__()
        state.update({name: getattr(self, name) for name in (*self._global, "variable_attrs", "_state_dict")})
        state.update(ipu_state_is_dirty=self.has_state(), host_state_is_dirty=False)
        return state

    def _set_types(self, **types):
        for name, dtype in types.items():
            dtype = torch.float32 if dtype is None else dtype
            assert dtype in _HALF_OR_FLOAT, "Accumulation types must be either torch.float32 or torch.float16"
            setattr(self, name, dtype)


def _given(arguments, own=()):
    """(arguments for torch's constructor, names that were given)."""
    names = [name for name, value in arguments.items() if value is not None and name not in ("self", "__class__")]
    return {name: arguments[name] for name in names if name not in own}, names


class SGD(Optimizer, torch.optim.SGD):
    """Gradient descent with momentum in tensors of its own (use_combined_accum=False) or in the accumulator."""

    _child_vars = ["loss_scaling"]
    _child_only = [
        "loss_scaling",
        "velocity_scaling",
        "use_combined_accum",
        "accum_type",
        "velocity_accum_type",
        "max_grad_norm",
    ]
    _group_vars = ["lr", "momentum", "dampening", "weight_decay", "nesterov", "velocity_scaling"]
    _global = ("loss_scaling", "use_combined_accum", "accum_type", "velocity_accum_type", "max_grad_norm")

    def __init__(
        self,
        params,
        lr,
        momentum=None,
        dampening=None,
        weight_decay=None,
        nesterov=None,
        maximize=None,
        foreach=None,
        differentiable=None,
        loss_scaling=None,
        velocity_scaling=None,
        use_combined_accum=None,
        accum_type=None,
        velocity_accum_type=None,
        max_grad_norm=None,
    ):
        parent, variables = _given(locals(), SGD._child_only)
        Optimizer.__init__(self)
        torch.optim.SGD.__init__(self, **parent)
        self.use_combined_accum = bool(use_combined_accum)
        self.loss_scaling = 1.0 if loss_scaling is None else loss_scaling
        self.max_grad_norm = float("inf") if max_grad_norm is None else max_grad_norm
        self._set_types(accum_type=accum_type, velocity_accum_type=velocity_accum_type)
        if self.use_combined_accum:
            self.defaults["velocity_scaling"] = 1.0 if velocity_scaling is None else velocity_scaling
            for group in self.param_groups:
                group.setdefault("velocity_scaling", self.defaults["velocity_scaling"])
        elif velocity_scaling is not None:
            logger.warning(
                "velocity_scaling value ignored when using the separate variant (use_combined_accum=False). "
                "In future, this will lead to an error. Please update your code."
            )
        self.variable_attrs = VariableAttributes(variables, [*self.defaults, *SGD._child_vars])


class RMSprop(Optimizer, torch.optim.RMSprop):
    """RMSprop as torch has it, or as TensorFlow does (use_tf_variant)."""

    _child_vars = ["loss_scaling"]
    _child_only = [
        "loss_scaling",
        "accum_type",
        "first_order_momentum_accum_type",
        "second_order_momentum_accum_type",
        "use_tf_variant",
    ]
    _group_vars = ["lr", "momentum", "weight_decay", "alpha", "eps", "centered"]
    _global = tuple(_child_only)

    def __init__(
        self,
        params,
        lr=None,
        alpha=None,
        eps=None,
        weight_decay=None,
        momentum=None,
        centered=None,
        foreach=None,
        maximize=None,
        differentiable=None,
        loss_scaling=None,
        accum_type=None,
        first_order_momentum_accum_type=None,
        second_order_momentum_accum_type=None,
        use_tf_variant=None,
    ):
        parent, variables = _given(locals(), RMSprop._child_only)
        Optimizer.__init__(self)
        torch.optim.RMSprop.__init__(self, **parent)
        self.loss_scaling = 1.0 if loss_scaling is None else loss_scaling
        self.use_tf_variant = bool(use_tf_variant)
        self._set_types(
            accum_type=accum_type,
            first_order_momentum_accum_type=first_order_momentum_accum_type,
            second_order_momentum_accum_type=second_order_momentum_accum_type,
        )
        self.variable_attrs = VariableAttributes(variables, [*self.defaults, *RMSprop._child_vars])


class LAMB(Optimizer, torch.optim.Optimizer):
    """Layer-wise adaptive moments (1904.00962)."""

    _child_vars = ["loss_scaling"]
    _child_only = [
        "loss_scaling",
        "bias_correction",
        "accum_type",
        "first_order_momentum_accum_type",
        "second_order_momentum_accum_type",
    ]
    _group_vars = ["lr", "weight_decay", "betas", "eps", "max_weight_norm"]
    _global = tuple(_child_only)

    def __init__(
        self,
        params,
        lr=None,
        betas=None,
        eps=None,
        weight_decay=None,
        bias_correction=None,
        loss_scaling=None,
        max_weight_norm=None,
        accum_type=None,
        first_order_momentum_accum_type=None,
        second_order_momentum_accum_type=None,
    ):
        _, variables = _given(locals())
        defaults = {
            "lr": 1e-3 if lr is None else lr,
            "betas": (0.9, 0.999) if betas is None else betas,
            "eps": 1e-8 if eps is None else eps,
            "weight_decay": 1e-2 if weight_decay is None else weight_decay,
            "max_weight_norm": 65500.0 if max_weight_norm is None else max_weight_norm,
        }
        Optimizer.__init__(self)
        torch.optim.Optimizer.__init__(self, params, defaults)
        self.bias_correction = True if bias_correction is None else bias_correction
        self.loss_scaling = 1.0 if loss_scaling is None else loss_scaling
        self.max_weight_norm = defaults["max_weight_norm"]
        self._set_types(
            accum_type=accum_type,
            first_order_momentum_accum_type=first_order_momentum_accum_type,
            second_order_momentum_accum_type=second_order_momentum_accum_type,
        )
        self.variable_attrs = VariableAttributes(variables, [*self.defaults, *LAMB._child_vars])

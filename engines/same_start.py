"""An equal start of all replicas of a training loop of one's own.

Each has the same module and settings, and the module's state on the first one.
"""

from __future__ import annotations

import hashlib
import pickle
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from common.errors import ConfigError, first_line
from parallel.processes import Processes

Result = TypeVar("Result")
# Last part of the name under which `state_dict` has the result of `get_extra_state`.
_EXTRA = "_extra_state"


def agreed(processes: Processes, function: Callable[[], Result]) -> Result:
    """Return the result of `function` on this replica. All replicas call.

    Where it fails on one replica, all fail: they would wait for that one otherwise.

    Args:
        processes: the replicas.
        function: is called once.

    Raises:
        Exception: the error of `function`.
        ConfigError: with the same message, on the replicas where it did not fail.
    """
    try:
        result = function()
    except Exception as error:
        # The other replicas wait for it below.
        processes.gather(first_line(error))
        raise
    for replica, message in enumerate(processes.gather(None)):
        if message is not None:
            raise ConfigError(f"replica {replica} cannot begin: {message}")
    return result


def check_same(processes: Processes, module: nn.Module, settings: Mapping[str, Any]) -> None:
    """Compare the module and the settings of all replicas, which all call.

    Args:
        processes: the replicas.
        module: of this replica.
        settings: of this replica, by name.

    Raises:
        ConfigError: on every replica: a name, shape, dtype or value differs, or a tensor cannot be
            sent.
    """
    description = agreed(processes, lambda: _described(module, settings))
    # A digest first: descriptions of a large module on many replicas would be large.
    digest = hashlib.sha256(repr(description).encode()).hexdigest()
    if len(set(processes.gather(digest))) == 1:
        return
    first, *others = processes.gather(description)
    for replica, other in enumerate(others, start=1):
        difference = _difference(first, other)
        if difference is not None:
            name, one, two = difference
            raise ConfigError(
                f"{name} is {one} on replica 0 and {two} on replica {replica}; "
                "make the same module with the same settings on all replicas"
            )


def share(processes: Processes, module: nn.Module, device: torch.device) -> None:
    """Give the first replica's parameters, persistent buffers and extra states to all others.

    All replicas call.

    Args:
        processes: the replicas.
        module: of this replica.
        device: on which tensors are sent: buffers may be elsewhere.

    Raises:
        ConfigError: on every replica: an extra state cannot be pickled, or the module does not take
            it.
    """
    state = module.state_dict()
    extra: Dict[str, Any] = {}
    for name, value in state.items():
        if _is_extra(name):
            extra[name] = value.cpu() if isinstance(value, torch.Tensor) else value
        elif value.numel():
            _broadcast(value, processes.replica_group, device)
    if not extra:
        return
    # Sent as bytes, so that an error in pickling is known before the others wait.
    is_first = processes.topology.is_main
    packed = agreed(processes, lambda: _packed(extra) if is_first else b"")
    # These bytes come from the first replica of this program, so that they may be unpickled.
    state.update(pickle.loads(processes.from_main(lambda: packed)))
    agreed(processes, lambda: _load(module, state, list(extra)))


def _described(module: nn.Module, settings: Mapping[str, Any]) -> Dict[str, str]:
    """Describe each entry of the module's state, in the module's order, then the settings."""
    trained = {name for name, value in module.named_parameters() if value.requires_grad}
    descriptions = {}
    for name, value in module.state_dict().items():
        if _is_extra(name):
            descriptions[name] = "an extra state"
            continue
        # Refused here, before any replica has been changed.
        _check_can_be_sent(name, value)
        dtype = str(value.dtype).replace("torch.", "")
        role = "trained" if name in trained else "not trained"
        descriptions[name] = f"{dtype} {list(value.shape)}, {role}"
    for name, value in settings.items():
        descriptions[name] = repr(value)
    return descriptions


def _difference(
    first: Mapping[str, str],
    other: Mapping[str, str],
) -> Optional[Tuple[str, str, str]]:
    """Return the first name at which descriptions differ, and its value in each.

    Their order counts, too.
    """
    for name in (*first, *other):
        one = first.get(name, "missing")
        two = other.get(name, "missing")
        if one != two:
            return name, one, two
    # Alike but for the order, which decides where a parameter lies in the buffers.
    orders: List[List[str]] = [list(first), list(other)]
    for one, two in zip(*orders):
        if one != two:
            return "the order of parameters", f"{one} first", f"{two} first"
    return None


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA


def _check_can_be_sent(name: str, value: Any) -> None:
    """Raise ConfigError for no tensor, or one whose elements are not in memory one by one."""
    if not isinstance(value, torch.Tensor):
        kind = type(value).__name__
        raise ConfigError(f"{name} in the module's state_dict is a {kind}, not a tensor")
    kinds = {
        "sparse": value.layout != torch.strided,
        "quantized": value.is_quantized,
        "without values (on the device meta)": value.is_meta,
    }
    for kind, applies in kinds.items():
        if applies:
            raise ConfigError(f"{name} is a tensor that is {kind}; replicas cannot be given it")
    if any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape)):
        raise ConfigError(
            f"{name} is an expanded tensor, which cannot be written to; register its .clone()"
        )


def _broadcast(
    tensor: torch.Tensor,
    group: Optional[dist.ProcessGroup],
    device: torch.device,
) -> None:
    """Send a tensor as bytes: gloo and NCCL do not know all dtypes (int16, complex numbers ...)."""
    sent = tensor.detach().resolve_conj().resolve_neg().to(device).contiguous()
    dist.broadcast(sent.view(-1).view(torch.uint8), group=group, group_src=0)
    tensor.copy_(sent)


def _packed(extra: Mapping[str, Any]) -> bytes:
    try:
        return pickle.dumps(dict(extra))
    except Exception as error:  # whatever an object of the user raises
        names = ", ".join(extra)
        reason = first_line(error)
        raise ConfigError(
            f"{names}: the extra state of a module must be picklable ({reason})"
        ) from None


def _load(module: nn.Module, state: Mapping[str, Any], names: List[str]) -> None:
    try:
        module.load_state_dict(state)
    except Exception as error:  # whatever set_extra_state of the user raises
        listed = ", ".join(names)
        reason = first_line(error)
        raise ConfigError(
            f"the module does not take its extra state ({listed}): {reason}; write set_extra_state"
        ) from None

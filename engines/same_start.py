"""Replicas of a loop of one's own begin alike: the same module and settings on each, with the first one's state."""

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
_EXTRA = "_extra_state"  # last part of the name under which `state_dict` has what `get_extra_state` returns


def agreed(processes: Processes, function: Callable[[], Result]) -> Result:
    """Return the result of `function` on this replica. All replicas call.

    Raises the error of `function`, and ConfigError with the same message on the replicas where it did not fail: they
    would wait for the failed one otherwise.
    """
    result: Optional[Result] = None
    failure: Optional[Exception] = None
    try:
        result = function()
    except Exception as error:
        failure = error
    messages = processes.gather(None if failure is None else first_line(failure))
    if failure is not None:
        raise failure
    for replica, message in enumerate(messages):
        if message is not None:
            raise ConfigError(f"replica {replica} cannot begin: {message}")
    return result


def check_same(processes: Processes, module: nn.Module, settings: Mapping[str, Any]) -> None:
    """Compare the module and the settings of all replicas, which all call.

    Raises ConfigError on every replica: a name, shape, dtype or value differs, or a tensor cannot be sent.
    """
    here = agreed(processes, lambda: {**_described(module), **{name: repr(value) for name, value in settings.items()}})
    # A digest first: of a large module on many replicas the descriptions would be large.
    digest = hashlib.sha256(repr(here).encode()).hexdigest()
    if len(set(processes.gather(digest))) == 1:
        return
    first, *others = processes.gather(here)
    for replica, other in enumerate(others, start=1):
        difference = _difference(first, other)
        if difference is not None:
            name, one, two = difference
            fault = f"{name} is {one} on replica 0 and {two} on replica {replica}"
            raise ConfigError(f"{fault}; make the same module with the same settings on all replicas")


def share(processes: Processes, module: nn.Module, device: torch.device) -> None:
    """Give the first replica's parameters, persistent buffers and extra states to all others. All replicas call.

    Args: device: on which tensors are sent: buffers may be elsewhere. Raises ConfigError on every replica: an extra
    state cannot be pickled, or the module does not take it.
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
    packed = agreed(processes, lambda: _packed(extra) if is_first else None)
    state.update(_unpacked(processes.from_main(lambda: packed)))
    agreed(processes, lambda: _load(module, state, list(extra)))


def _described(module: nn.Module) -> Dict[str, str]:
    """Return what each entry of the module's state is, by name, in the module's order."""
    trained = {name for name, each in module.named_parameters() if each.requires_grad}
    found = {}
    for name, value in module.state_dict().items():
        if _is_extra(name):
            found[name] = "an extra state"
            continue
        _check_can_be_sent(name, value)
        role = "trained" if name in trained else "not trained"
        found[name] = f"{str(value.dtype).replace('torch.', '')} {list(value.shape)}, {role}"
    return found


def _difference(first: Mapping[str, str], other: Mapping[str, str]) -> Optional[Tuple[str, str, str]]:
    """Return the first name at which descriptions differ and what it is in each; an order counts, too."""
    for name in (*first, *other):
        one = first.get(name, "missing")
        two = other.get(name, "missing")
        if one != two:
            return name, one, two
    orders: List[List[str]] = [list(first), list(other)]
    for one, two in zip(*orders):
        if one != two:
            return "the order of parameters", f"{one} first", f"{two} first"
    return None


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA


def _check_can_be_sent(name: str, value: Any) -> None:
    """Raise ConfigError for a value that is no tensor, or one whose elements are not in memory one by one."""
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"{name} in the module's state_dict is a {type(value).__name__}, not a tensor")
    kinds = {
        "sparse": value.layout != torch.strided,
        "quantized": value.is_quantized,
        "without values (on the device meta)": value.is_meta,
    }
    for kind, is_so in kinds.items():
        if is_so:
            raise ConfigError(f"{name} is a tensor that is {kind}; replicas cannot be given it")
    if any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape)):
        raise ConfigError(f"{name} is an expanded tensor, which cannot be written to; register its .clone()")


def _broadcast(tensor: torch.Tensor, group: Optional[dist.ProcessGroup], device: torch.device) -> None:
    """Send a tensor as bytes: gloo and NCCL do not know all dtypes (int16, uint16, complex numbers ...)."""
    sent = tensor.detach().resolve_conj().resolve_neg().to(device).contiguous()
    dist.broadcast(sent.view(-1).view(torch.uint8), group=group, group_src=0)
    tensor.copy_(sent)


def _packed(extra: Mapping[str, Any]) -> bytes:
    try:
        return pickle.dumps(dict(extra))
    except Exception as error:  # whatever an object of the user raises
        names = ", ".join(extra)
        raise ConfigError(f"{names}: the extra state of a module must be picklable ({first_line(error)})") from None


def _unpacked(packed: bytes) -> Dict[str, Any]:
    """What this program's first replica packed."""
    return pickle.loads(packed)


def _load(module: nn.Module, state: Mapping[str, Any], names: List[str]) -> None:
    try:
        module.load_state_dict(state)
    except Exception as error:  # whatever set_extra_state of the user raises
        fault = f"the module does not take its extra state ({', '.join(names)}): {first_line(error)}"
        raise ConfigError(f"{fault}; write set_extra_state") from None

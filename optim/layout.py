"""How the parameters of a model lie in one flat buffer, in rows of 64 elements, and how passes over it are run."""

from __future__ import annotations

from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

import torch

ROW = 64  # elements; each parameter begins with a row of its own
_CHUNK = 1 << 17  # elements computed at a time on a CPU: what is made of them stays in the cores' caches

# Calls a pass with tensors [rows, ...], some of which may be None, and with what is the same for all rows; returns what
# the pass does, [rows] each.
Run = Callable[[Callable, Sequence[Optional[torch.Tensor]], Sequence], object]


class Layout:
    """Places of named tensors in a flat buffer. Each begins with a row of ROW elements; zeros fill its last row.

    So a property of a parameter, such as its learning rate, is one number a row.

    names: of the parameters, in order. places: name -> (first element, number of elements). length: of a buffer.
    rows: of each parameter in a buffer as [rows, ROW].
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]):
        """Args: parameters: by name, all on one device."""
        self.names = list(parameters)
        self.device = next(iter(parameters.values())).device
        self._shapes = [tuple(parameter.shape) for parameter in parameters.values()]
        rows = [-(-parameter.numel() // ROW) for parameter in parameters.values()]
        starts = [ROW * sum(rows[:place]) for place in range(len(rows))]
        self.places = {name: (start, parameters[name].numel()) for name, start in zip(parameters, starts)}
        self.length = ROW * sum(rows)
        self._rows = torch.tensor(rows, device=self.device)
        self.rows = [slice(start // ROW, start // ROW + count) for start, count in zip(starts, rows)]
        self._owners = torch.repeat_interleave(self._rows, output_size=sum(rows))

    def zeros(self, dtype: torch.dtype, value: float = 0.0) -> torch.Tensor:
        """A buffer with `value` everywhere."""
        return torch.full((self.length,), value, dtype=dtype, device=self.device)

    def views(self, flat: torch.Tensor) -> List[torch.Tensor]:
        """The parameters' parts of a buffer, each in its shape."""
        places = zip(self.places.values(), self._shapes)
        return [flat[start : start + count].view(shape) for (start, count), shape in places]

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over the rows of each parameter: of [rows], float64 [parameters]. Each depends on its own rows alone."""
        return torch.segment_reduce(values.double(), "sum", lengths=self._rows, unsafe=True)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """A value for each parameter at all of its rows: of [parameters], [rows, 1]."""
        return values[self._owners][:, None]


class Buffers(NamedTuple):
    """Flat buffers of one layout.

    gradients: float32. weights, slots: what persists. working: the module's parameters in the dtype that it computes
    in; where that is the weights' dtype it is the same tensor.
    """

    gradients: torch.Tensor
    weights: torch.Tensor
    working: torch.Tensor
    slots: Dict[str, torch.Tensor]

    def refresh(self) -> None:
        """The module's parameters become the persistent weights."""
        if self.working is not self.weights:
            self.working.copy_(self.weights)


def in_rows(flat: torch.Tensor) -> torch.Tensor:
    """A buffer as [rows, ROW]."""
    return flat.view(-1, ROW)


def in_parts(function: Callable, rows: Sequence[Optional[torch.Tensor]], constants: Sequence) -> object:
    """Runs a pass as it is: on a CPU in parts that fit into caches, elsewhere in one."""
    count = len(rows[0])
    size = _CHUNK // ROW if rows[0].device.type == "cpu" else count
    found: List[object] = []
    for start in range(0, count, size):
        part = [None if each is None else each[start : start + size] for each in rows]
        found.append(function(*part, *constants))
    if isinstance(found[0], tuple):
        return tuple(torch.cat(each) for each in zip(*found))
    return None if found[0] is None else torch.cat(found)

"""How parameters lie in one flat buffer, in rows of 64 elements, and how passes over it are run."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Tuple

import torch

ROW = 64  # elements; each parameter begins with a row of its own
_CHUNK = 1 << 17  # elements computed at a time on a CPU: what is made of them stays in its caches

# A pass over the memory. It is called with rows, a NamedTuple of tensors [rows, ...] of which some
# may be None, and with what is the same for all rows, and returns tensors [rows] or None.
Pass = Callable[[Any, Any], Any]
# Runs a pass, which is called with parts of the rows or with all; returns what the pass does.
Run = Callable[[Pass, Any, Any], Any]


class Layout:
    """Where named tensors lie in a flat buffer: each from the start of a row, padded with zeros.

    So a property of a parameter, such as its learning rate, is one number a row.

    names: of the parameters, in order.
    places: name -> (first element, number of elements).
    length: of a buffer.
    rows: of each parameter in a buffer as [rows, ROW].
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]):
        """
        Args:
            parameters: by name, all on one device.
        """
        self.names = list(parameters)
        self.device = next(iter(parameters.values())).device
        self.places: Dict[str, Tuple[int, int]] = {}
        self.rows: List[slice] = []
        self._shapes: List[Tuple[int, ...]] = []

        # Parameters lie in their order, each rounded up to whole rows.
        first = 0
        for name, parameter in parameters.items():
            count = -(-parameter.numel() // ROW)
            self.places[name] = (first * ROW, parameter.numel())
            self.rows.append(slice(first, first + count))
            self._shapes.append(tuple(parameter.shape))
            first += count
        self.length = first * ROW

        # For `sums` and `spread`, which go between parameters and rows: number of rows of each
        # parameter, [parameters], and parameter of each row, [rows].
        counts = [rows.stop - rows.start for rows in self.rows]
        self._counts = torch.tensor(counts, device=self.device)
        # Its size is given: torch would wait for a GPU to learn it.
        self._owners = torch.repeat_interleave(self._counts, output_size=first)

    def zeros(self, dtype: torch.dtype, value: float = 0.0) -> torch.Tensor:
        """Return a buffer with `value` everywhere, of `dtype`."""
        return torch.full((self.length,), value, dtype=dtype, device=self.device)

    def views(self, flat: torch.Tensor) -> List[torch.Tensor]:
        """Return the parameters' parts of the buffer `flat`, each in its shape."""
        views = []
        for (first, count), shape in zip(self.places.values(), self._shapes):
            views.append(flat[first : first + count].view(shape))
        return views

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Add up over the rows of each parameter; each sum depends on its own rows alone.

        Args:
            values: [rows].

        Returns:
            float64 [parameters].
        """
        # Not index_add_, whose order on a GPU changes from run to run.
        return torch.segment_reduce(values.double(), "sum", lengths=self._counts, unsafe=True)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Repeat a value for each parameter at all of its rows.

        Args:
            values: [parameters].

        Returns:
            [rows, 1].
        """
        return values[self._owners][:, None]


class Buffers(NamedTuple):
    """Flat buffers of one layout.

    gradients: float32.
    weights, slots: what persists.
    working: the module's parameters in the dtype that it computes in; where that is the weights'
        dtype it is the same tensor.
    """

    gradients: torch.Tensor
    weights: torch.Tensor
    working: torch.Tensor
    slots: Dict[str, torch.Tensor]

    def refresh(self) -> None:
        """Set the module's parameters to the persistent weights."""
        if self.working is not self.weights:
            self.working.copy_(self.weights)


def in_rows(flat: torch.Tensor) -> torch.Tensor:
    """Return the buffer `flat` as [rows, ROW]."""
    return flat.view(-1, ROW)


def in_parts(function: Pass, rows: Any, constants: Any) -> Any:
    """Run a pass of plain torch: on a CPU in parts that fit into caches, elsewhere in one.

    Args:
        function: the pass, called with rows and constants.
        rows: a NamedTuple of tensors [rows, ...], of which some but the first may be None.
        constants: the same for all rows.

    Returns:
        What the pass returns: None, [rows], or a tuple of these.
    """
    # On a GPU each operation on a part would be another launch.
    count = len(rows[0])
    size = _CHUNK // ROW if rows[0].device.type == "cpu" else count
    results = []
    for start in range(0, count, size):
        place = slice(start, start + size)
        part = [None if tensor is None else tensor[place] for tensor in rows]
        results.append(function(rows._make(part), constants))
    # Sums are of single rows, so their bits do not depend on where parts end.
    if isinstance(results[0], tuple):
        return tuple(torch.cat(parts) for parts in zip(*results))
    if results[0] is None:
        return None
    return torch.cat(results)

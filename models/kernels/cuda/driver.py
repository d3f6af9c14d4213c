"""CUDA's driver: loads machine code on a GPU and launches its kernels in torch's stream."""

from __future__ import annotations

import ctypes
import functools
from typing import Dict

import torch

# CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, and what a launch may have without it.
_SHARED_BYTES = 8
_SHARED_BYTES_UNASKED = 48 << 10


class DriverError(Exception):
    """The driver is missing, or refuses machine code or a launch."""


class Program:
    """Kernels of a binary on a GPU."""

    def __init__(self, binary: bytes, device: torch.device):
        """Load machine code.

        Args:
            binary: a cubin for the device.
            device: a GPU.

        Raises:
            OSError: there is no driver.
            DriverError: it refuses.
        """
        self._device = device
        self._kernels: Dict[str, ctypes.c_void_p] = {}
        self._shared_bytes: Dict[str, int] = {}  # by kernel: the most that it was allowed
        self._module = ctypes.c_void_p()
        with torch.cuda.device(device):
            _enter_context(device)
            _check(_cuda().cuModuleLoadData(ctypes.byref(self._module), binary))

    def launch(
        self,
        kernel: str,
        blocks: int,
        threads: int,
        shared_bytes: int,
        arguments: ctypes.Structure,
    ) -> None:
        """Start a kernel in the current stream.

        Args:
            kernel: its name.
            blocks: of the grid.
            threads: of a block.
            shared_bytes: of a block.
            arguments: the kernel's one argument.

        Raises:
            DriverError: there is no such kernel, or it cannot have so much.
        """
        with torch.cuda.device(self._device):
            # Autograd's threads may have none yet.
            _enter_context(self._device)
            function = self._function(kernel, shared_bytes)
            # Copied by the driver before it returns.
            values = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
            stream = torch.cuda.current_stream(self._device).cuda_stream
            _check(
                _cuda().cuLaunchKernel(
                    function,
                    *(ctypes.c_uint(size) for size in (blocks, 1, 1)),
                    *(ctypes.c_uint(size) for size in (threads, 1, 1)),
                    ctypes.c_uint(shared_bytes),
                    ctypes.c_void_p(stream),
                    values,
                    None,
                )
            )

    def _function(self, kernel: str, shared_bytes: int) -> ctypes.c_void_p:
        """Return a kernel that may have so much shared memory."""
        if kernel not in self._kernels:
            function = ctypes.c_void_p()
            _check(
                _cuda().cuModuleGetFunction(ctypes.byref(function), self._module, kernel.encode())
            )
            self._kernels[kernel] = function
        allowed = self._shared_bytes.get(kernel, _SHARED_BYTES_UNASKED)
        if shared_bytes > allowed:
            function = self._kernels[kernel]
            _check(_cuda().cuFuncSetAttribute(function, _SHARED_BYTES, shared_bytes))
            self._shared_bytes[kernel] = shared_bytes
        return self._kernels[kernel]


def _enter_context(device: torch.device) -> None:
    """Make the GPU's context, which torch uses, the thread's unless it has one."""
    context = ctypes.c_void_p()
    _check(_cuda().cuCtxGetCurrent(ctypes.byref(context)))
    if not context:
        _check(_cuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), device.index or 0))
        _check(_cuda().cuCtxSetCurrent(context))


def _check(result: int) -> None:
    """Raise DriverError unless the driver's `result` is 0."""
    if result:
        text = ctypes.c_char_p()
        _cuda().cuGetErrorString(result, ctypes.byref(text))
        message = text.value.decode() if text.value else f"error {result}"
        raise DriverError(f"CUDA's driver: {message}")


@functools.lru_cache(maxsize=None)
def _cuda() -> ctypes.CDLL:
    """Return the driver. Raises OSError."""
    return ctypes.CDLL("libcuda.so.1")

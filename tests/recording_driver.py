"""Triton's launches without a GPU: they go through its own launcher to a CUDA driver that records
them.

Only for processes of their own, which do not interpret kernels.
"""

import ctypes
import os
import re
import struct
import subprocess
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

_SOURCE = Path(__file__).with_suffix(".c")
_BYTES = {"u64": 8, "f64": 8, "u32": 4, "f32": 4, "u16": 2, "u8": 1}


class Launch(NamedTuple):
    """A launch of a kernel.

    passed: values of the program's parameters, as the driver has got them. expected: those of the
    kernel's arguments.
    """

    name: str
    ptx: str
    machine_code: bytes
    passed: list
    expected: list


def start(folder: Path) -> ctypes.CDLL:
    """Make the driver Triton's, and return it. folder: gets its library."""
    library = folder / "libcuda.so.1"
    flags = [
        "-shared",
        "-fPIC",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-Wl,-soname,{library.name}",
    ]
    subprocess.run(["cc", *flags, "-o", library, _SOURCE], check=True)
    # Triton links its launcher to the one in this folder, and finds it by name where it is loaded
    # already.
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    driver = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    driver.launched_values.restype = ctypes.POINTER(ctypes.c_uint64)
    triton.runtime.driver.set_active(_driver())
    return driver


def launched(driver: ctypes.CDLL, work) -> list:
    """Compile and launch the kernels of `work()`; return the Launches in their order. driver: see
    `start`."""
    made = []
    run = triton.JITFunction.run

    def record(kernel, *values, grid, warmup, **named):
        binary = run(kernel, *values, grid=grid, warmup=True, **named)
        ptx = binary.asm["ptx"]
        sizes = [_BYTES[kind] for kind in _parameters(ptx)]
        driver.expect(len(sizes), (ctypes.c_int * len(sizes))(*sizes))
        run(kernel, *values, grid=grid, warmup=False, **named)
        passed = [
            driver.launched_programs(),
            *(driver.launched_values()[place] for place in range(len(sizes))),
        ]
        arguments = {**dict(zip(kernel.arg_names, values, strict=False)), **named}
        expected = [grid[0], *(value % 2**64 for value in _values(kernel, arguments))]
        masks = [2 ** (8 * size) - 1 for size in (8, *sizes)]
        expected = [value & mask for value, mask in zip(expected, masks, strict=True)]
        made.append(Launch(kernel.__name__, ptx, binary.asm["cubin"], passed, expected))

    with mock.patch.object(triton.JITFunction, "run", record):
        work()
    return made


def _driver():
    """Triton's driver, which asks no GPU what torch would have to start CUDA for."""
    from triton.backends.nvidia.driver import CudaDriver

    driver = CudaDriver()
    driver.get_current_device = lambda: 0
    driver.get_current_stream = lambda device: 0
    driver.get_current_target = lambda: GPUTarget("cuda", 90, 32)
    return driver


def _parameters(ptx: str) -> list:
    """The kinds of a program's parameters, such as u64."""
    declaration = re.search(r"\.entry \w+\((.*?)\)", ptx, re.DOTALL)[1]
    return re.findall(r"\.param \.(\w+)", declaration)


def _values(kernel: triton.JITFunction, arguments: dict) -> list:
    """The values of a program's parameters by Triton's rules, from the kernel's arguments.

    Tuples follow one another as their values do. Constants, None and, unless the kernel forbids it,
    1 are compiled into the program. Last are two pointers to memory that Triton's tools use.
    """
    values = []
    for parameter in kernel.params:
        given = arguments[parameter.name]
        for value in given if isinstance(given, tuple) else (given,):
            compiled_in = parameter.is_constexpr or value is None
            if type(value) is int and value == 1 and not parameter.do_not_specialize:
                compiled_in = True
            if not compiled_in:
                values.append(_bits(value))
    return [*values, 0, 0]


def _bits(value) -> int:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, float):
        return struct.unpack("<I", struct.pack("<f", value))[0]
    return int(value)

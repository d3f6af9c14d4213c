"""Compiles Triton kernels for a GPU that is not here: the interpreter runs what the compiler refuses.

Used in a process of its own, without the interpreter: `run` starts one.
"""

import os
import subprocess
import sys
from pathlib import Path

_TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "int32": "i32", "bool": "i1"}


def assembly(module, work) -> dict:
    """Name -> PTX for compute capability 9.0 of all kernels of a module that `work()` starts, which then do nothing."""
    import triton

    kernels = {name: each for name, each in vars(module).items() if isinstance(each, triton.JITFunction)}
    started = {}
    for name in kernels:
        setattr(module, name, _Recorder(name, started))
    try:
        work()
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)
    return {name: _compiled(kernels[name], *arguments) for name, arguments in started.items()}


class _Recorder:
    """In the place of a kernel: notes how it is started."""

    def __init__(self, name, started):
        self._name, self._started = name, started

    def __getitem__(self, grid):
        return lambda *values, **named: self._started.update({self._name: (values, named)})


def _compiled(kernel, values, named) -> str:
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    options = {key: named.pop(key) for key in ("num_warps", "num_stages") if key in named}
    values = {**dict(zip(kernel.arg_names, values)), **named}
    signature, constants, attributes = {}, {}, {}
    for number, parameter in enumerate(kernel.params):
        key, value = parameter.name, values[parameter.name]
        whole = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None:
            signature[key], constants[(number,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[key] = f"*{_TYPES[str(value.dtype).split('.')[1]]}"
        else:
            signature[key] = "i32" if isinstance(value, int) else "fp32"
        if isinstance(value, torch.Tensor) or (whole and signature[key] == "i32"):
            attributes[(number,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def run(script: str, cache: Path) -> str:
    """What a script prints that calls `assembly`. cache: folder for what is compiled."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    root = Path(__file__).resolve().parent.parent
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout

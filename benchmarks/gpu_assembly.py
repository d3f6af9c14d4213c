"""Our Triton kernels compiled for a GPU that is not there, and their assembly: instructions, registers, spills.

The process must not have Triton's interpreter on. The disassembler is the one in Triton's wheel.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple
from unittest import mock

PRODUCT = 16 * 8 * 16  # multiply-adds of a tensor core's instruction for half precision, HMMA.16816


class Launch(NamedTuple):
    """One launch of a kernel, "file.function". values: of its arguments, tensors among them, by name."""

    kernel: str
    programs: int
    values: Dict[str, Any]
    compile: Callable[[], Any]  # returns Triton's compiled kernel; again for nothing

    def assembly(self) -> Assembly:
        return _assembly(self.compile().asm["cubin"])


class Loop(NamedTuple):
    """Instructions of a loop without those of loops in it; products: of these, tensor cores'."""

    instructions: int
    products: int
    depth: int


class Assembly(NamedTuple):
    """straight: the instructions outside of loops, as a loop; spilled: registers of 32 bits in local memory."""

    straight: Loop
    loops: List[Loop]
    registers: int
    spilled: int

    def executed(self, multiply_adds: float) -> float:
        """Instructions that a warp issues for that many multiply-adds on tensor cores: the loop with the products, if
        there is one, turns as often as these need."""
        assert len(self.loops) <= 1 and all(loop.products for loop in self.loops), f"not understood: {self.loops}"
        left = multiply_adds / PRODUCT - self.straight.products
        return self.straight.instructions + sum(loop.instructions * left / loop.products for loop in self.loops)

    def turned(self, turns: float) -> float:
        """Instructions that a warp issues if its loop turns that often."""
        assert len(self.loops) <= 1, f"not understood: {self.loops}"
        return self.straight.instructions + sum(loop.instructions * turns for loop in self.loops)


class _Driver:
    """Of a GPU with compute capability 9.0 that is not there."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def launches(work: Callable[[], object]) -> List[Launch]:
    """All launches of Triton kernels by `work`, which then do nothing. Tensors may be on the meta device."""
    import triton

    made: List[Launch] = []
    run = triton.JITFunction.run

    def record(kernel, *values, grid, warmup, **named):
        compile = functools.partial(run, kernel, *values, grid=grid, warmup=True, **named)
        name = f"{kernel.module.rpartition('.')[2]}.{kernel.__name__}"
        made.append(Launch(name, grid[0], {**dict(zip(kernel.arg_names, values)), **named}, compile))

    triton.runtime.driver.set_active(_Driver())
    with mock.patch.object(triton.JITFunction, "run", record):
        work()
    return made


@functools.lru_cache(maxsize=None)
def _assembly(cubin: bytes) -> Assembly:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return parsed(_tool("nvdisasm", "-c", file.name), _tool("cuobjdump", "-res-usage", file.name))


def _tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def parsed(code: str, usage: str) -> Assembly:
    """From what nvdisasm and cuobjdump print. A loop is what lies between a branch backwards and its label."""
    lines: List[str] = []
    labels: Dict[str, int] = {}
    spans: Dict[int, int] = {}  # first instruction -> last
    for text in map(str.strip, code.splitlines()):
        if label := re.match(r"(\.L\w+):", text):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", text):
            branch = re.search(r"\bBRA\b.*`\((\.L\w+)\)", instruction[1])
            target = labels.get(branch[1]) if branch else None
            if target == len(lines):  # the end: a branch to itself, and padding
                break
            if target is not None:
                spans[target] = len(lines)
            lines.append(instruction[1])
    depths = [sum(first <= number <= last for first, last in spans.items()) for number in range(len(lines))]
    products = ["HMMA" in line for line in lines]

    def loop(numbers: List[int], depth: int) -> Loop:
        own = [number for number in numbers if depths[number] == depth]
        return Loop(len(own), sum(products[number] for number in own), depth)

    loops = [
        loop(list(range(first, last + 1)), sum(start <= first and last <= end for start, end in spans.items()))
        for first, last in sorted(spans.items())
    ]
    resources = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    return Assembly(loop(list(range(len(lines))), 0), loops, resources["REG"], -(-resources["STACK"] // 4))

"""A process that compiles Triton's programs for a GPU which it does not touch.

`engines/ahead.py` starts it. It reads a program a line, and answers each with a line: a text in
JSON, which is empty or says why the program could not be compiled.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from typing import Any, Callable

import triton
from triton.backends.compiler import GPUTarget

from common.errors import first_line


class _Driver:
    """Stands for Triton's driver, which would start CUDA, as a compiler needs to know the kind of GPU only.

    Triton asks the active driver for its device and its target. This was tried with Triton 3.6 and 3.8.
    Were it to ask for more, programs would fail here, and be compiled at their first launch.
    """

    def __init__(self, target: GPUTarget):
        self._target = target

    def get_current_device(self) -> int:
        """Return the number of the device."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Return the kind of GPU that is compiled for."""
        return self._target


def kernel_of(description: str) -> triton.JITFunction:
    """Return the kernel of a program, from Triton's description of it."""
    module, _, name = json.loads(description)["name"].rpartition(".")
    return getattr(importlib.import_module(module), name)


def with_tuples(compile_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compiles a program whose constants may be lists in the place of tuples.

    The description of a program is JSON, which makes a list of a kernel's constant that is a tuple.
    Triton 3.8 makes a tuple of it again, 3.6 does not: the program's name in the cache has the text
    of its constants, so that no launch would find it.

    Args:
        compile_: `JITFunction._do_compile`, whose argument `constexprs` has the constants.
    """
    signature = inspect.signature(compile_)

    def compiling(*arguments: Any, **named: Any) -> Any:
        """Compile a program with the constants that a launch would have."""
        bound = signature.bind(*arguments, **named)
        constants = bound.arguments["constexprs"]
        bound.arguments["constexprs"] = {
            place: tuple(value) if isinstance(value, list) else value
            for place, value in constants.items()
        }
        return compile_(*bound.args, **bound.kwargs)

    return compiling


def compile_program(program: str) -> str:
    """Compile a program into Triton's cache.

    Args:
        program: see `engines.ahead.Recorded`.

    Returns:
        Why it failed, or "".
    """
    try:
        fields = json.loads(program)
        triton.runtime.driver.set_active(_Driver(GPUTarget(**fields["target"])))
        description = fields["description"]
        kernel_of(description).preload(description)
    except Exception as error:
        # Whatever is wrong with one program, others are wanted; its launch will show it again.
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


def main() -> None:
    """Answer lines until there are no more."""
    # Answers have the only way to stdout: what else is printed there would be taken for one.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    triton.JITFunction._do_compile = with_tuples(triton.JITFunction._do_compile)
    for program in sys.stdin:
        answers.write(f"{json.dumps(compile_program(program))}\n")
        answers.flush()


if __name__ == "__main__":
    main()

"""Kernels in Triton's interpreter without what it does again for every function that a kernel
calls."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def _language_is_replaced_once_a_launch():
    """The interpreter puts its functions in the place of Triton's at each launch, and again, which
    changes nothing, at each call of a kernel's function: that took more than half of these tests'
    time."""
    if torch.cuda.is_available():
        yield
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    replace = interpreter._patch_lang
    launch = interpreter.GridExecutor.__call__
    done = set()  # of this launch: the names that a function sees, by their dictionary

    def replace_once(function):
        names = id(function.__globals__)
        if names in done:
            return None  # which would restore them; nobody asks for it at a call
        done.add(names)
        return replace(function)

    def launch_anew(*arguments, **named):
        done.clear()
        return launch(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace_once)
        patch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
        yield

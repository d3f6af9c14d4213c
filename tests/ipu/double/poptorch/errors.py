"""What PopTorch raises and logs: one error type, one logger."""

import logging

logger = logging.getLogger("poptorch::python")


class Error(RuntimeError):
    """Raised by PopTorch's Python layer and its compiler alike."""


def python_error(message):
    """An Error of the Python layer; it carries a tag before the message (PopTorch 3.4, python/_impl.py)."""
    return Error(f"'poptorch_py_error': {message}")

"""Commands of tools/, run within this process."""

import contextlib
import io
from typing import Callable, List

from common.errors import DONE, WRONG_INPUT, DataError


def output_of(main: Callable[[List[str]], int], arguments: List[str]) -> str:
    """Run a command and return what it prints, of which the terminal shows nothing.

    Args:
        main: of the command; takes the arguments and returns the exit code.
        arguments: of the command line, without the program's name.

    Raises:
        AssertionError: the command ends with the code of another failure.
        DataError: it refuses its input.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(arguments)
    if code == WRONG_INPUT:
        raise DataError(printed.getvalue())
    assert code == DONE, printed.getvalue()
    return printed.getvalue()

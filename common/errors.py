"""Errors that the user can mend, each one line with place, fault and remedy; and the exit codes of
commands.
"""

import errno

from common.credentials import masked
from common.text import printable

DONE = 0
FAILED = 1
WRONG_INPUT = 2
STOPPED = 75  # by a signal, and saved: the same command goes on
LEFT_OUT = 76  # of a rank in an elastic run that the others went on without

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # numbers of an OSError that blames no input


class OneLineError(Exception):
    """An error that is printed as one line without a traceback.

    code: with which the command exits.
    """

    code: int

    def __str__(self) -> str:
        # Names that the message quotes, of files, URLs and keys, may hold anything.
        return printable(masked(" ".join(super().__str__().splitlines())))


class UserError(OneLineError):
    """Input that cannot be used."""

    code = WRONG_INPUT


class MachineError(OneLineError):
    """A fault of the machine, or of another process, that the input has no part in."""

    code = FAILED


class ConfigError(UserError):
    """A recipe that cannot be run as written."""


class DataError(UserError):
    """Images, folders or labels that cannot be used."""


class CheckpointError(UserError):
    """A checkpoint or run folder that does not fit the recipe, or cannot be read."""


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error; for errors that a compiler wraps, of the one
    inside.
    """
    cause = getattr(error, "inner_exception", error)  # Dynamo's name for what a backend raises
    return masked(next(iter(str(cause).strip().splitlines()), type(cause).__name__))

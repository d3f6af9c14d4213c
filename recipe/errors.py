"""The error that is the user's to mend: one line that says what, where and the remedy; and what commands exit with."""

DONE, FAILED, WRONG_INPUT, STOPPED = 0, 1, 2, 75


class UserError(Exception):
    """Input that cannot be used: printed as one line without a traceback; the command exits with 2."""

    def __str__(self) -> str:
        # Names that the message quotes, of files and keys, may hold line breaks.
        return " ".join(super().__str__().splitlines())


class ConfigError(UserError):
    """A recipe that cannot be run as written."""


class DataError(UserError):
    """Images, folders or labels that cannot be used."""


class CheckpointError(UserError):
    """A checkpoint or run folder that does not fit the recipe, or cannot be read."""


def first_line(error: BaseException) -> str:
    """What an error of a library says, in one line: of what a compiler packs up, the error within."""
    cause = getattr(error, "inner_exception", error)  # Dynamo's name for what a backend raises
    return next(iter(str(cause).strip().splitlines()), type(cause).__name__)

"""How all commands start, read their command line, and end. Loads nothing heavy.

A command's file begins with `run(__file__)`, before its own imports.
"""

import argparse
import errno
import functools
import importlib
import io
import os
import signal
import sys
import time
import traceback
from typing import Any, Dict

from common import additions, cores, machine_faults
from common.credentials import masked
from common.errors import DISK_FULL, DONE, FAILED, STOPPED, WRONG_INPUT, ConfigError, OneLineError
from common.files import expanded

_ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
AGAIN = "rerun the same command"
_REMEDIES = dict.fromkeys(DISK_FULL, "make room")
# Variables that torch reads once, as CUDA starts; their values, unless the user has set them or
# those behind.
_OF_CUDA = (
    # For run.deterministic; 32 MiB, as on newer GPUs without it.
    ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", ()),
    # Image sizes leave no holes.
    ("PYTORCH_ALLOC_CONF", "expandable_segments:True", ("PYTORCH_CUDA_ALLOC_CONF",)),
)
# Variables by which libraries that count cores without a control group's quota are told how many
# there are.
_OF_CORES = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
_SAME_SECONDS = 0.5  # timeout(1) and some terminals deliver one signal twice
_interrupted = None  # when Ctrl-C came, in seconds of time.monotonic


class Parser(argparse.ArgumentParser):
    """Parser of all commands: a leading ~ of a value is expanded, faults are one line without
    credentials, and --import takes files that add to recipes.
    """

    def __init__(self, *arguments, remedy=None, **keywords):
        """
        Args:
            arguments: of argparse's parser, as are `keywords`.
            remedy: called with a flag that the command does not have, such as `--lr`; returns what
                to write instead, or nothing.
        """
        super().__init__(*arguments, **keywords)
        self._remedy = remedy
        additions.add_flag(self)

    def parse_intermixed_args(self, args=None, namespace=None):
        """Parse `args` as argparse does, with remedies for unknown flags."""
        options, unknown = self.parse_known_intermixed_args(args, namespace)
        if unknown:
            remedies = [self._remedy(word) for word in unknown] if self._remedy else []
            known = [remedy for remedy in remedies if remedy]
            fault = f"unrecognized arguments: {' '.join(unknown)}"
            self.error("; ".join([fault, *known[:1]]))
        return options

    def parse_known_args(self, args=None, namespace=None):
        """Parse `args` as argparse does; a shell leaves the ~ in --flag=~/path alone, so it is
        expanded here.
        """
        return super().parse_known_args(self._at_home(args), namespace)

    def parse_known_intermixed_args(self, args=None, namespace=None):
        """Parse `args`, options between the others as well, as `parse_known_args` does.

        Up to Python 3.12.7 and 3.13.0 argparse calls `parse_known_args` here, later it does not.
        """
        return super().parse_known_intermixed_args(self._at_home(args), namespace)

    def _at_home(self, args):
        """Return the words of a command line, None being the process's, each with its home folder."""
        words = sys.argv[1:] if args is None else args
        return [self._word_at_home(word) for word in words]

    def _word_at_home(self, word):
        """Return a word with the home folder in the place of the ~ behind its =."""
        flag, equals, path = str(word).partition("=~")
        if not equals or not flag.startswith("--"):
            return word
        try:
            return f"{flag}={expanded(f'~{path}')}"
        except ValueError as error:
            self.error(f"{flag}: {error}")

    def error(self, message):
        """Print `message` in one line and exit with the code for wrong input."""
        self.exit(WRONG_INPUT, f"{self.prog}: {masked(message)}; see {self.prog} --help\n")


class SubcommandParser(Parser):
    """Parser of a subcommand, which takes options between its other arguments, as commands do."""

    _is_parsing = False

    def parse_known_args(self, args=None, namespace=None):
        """Parse `args`, which argparse has of the command that this one belongs to."""
        # The intermixed parse may call this method in turn: see Parser.
        if self._is_parsing:
            return super().parse_known_args(args, namespace)
        self._is_parsing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_parsing = False


def add_choice_of_weights(parser):
    """Add --weights and --best to a parser, by which commands choose among a run's weights."""
    which = (
        "which weights of a run (default: trained; with --best those that scored best); "
        "ema: of other programs' files"
    )
    parser.add_argument(
        "--weights", choices=("trained", "step_average", "epoch_average", "ema"), help=which
    )
    parser.add_argument(
        "--best", action="store_true", help="of a run, the checkpoint with the best top-1"
    )


def naming(config, function, recipe):
    """Return function(recipe), with the recipe's file named in a ConfigError.

    Args:
        config: the file.
        function: called with the recipe.
        recipe: read from the file.
    """
    try:
        return function(recipe)
    except ConfigError as error:
        raise ConfigError(f"{config}: {error}" if str(error) else "") from None


def run(file, computes=True):
    """End the process with the exit code of main() in a command, whose imports Ctrl-C may
    interrupt.

    Args:
        file: of the command.
        computes: the command has all cores to itself; one that shares them among its processes does
            that itself.
    """
    _open_streams()
    _set_variables(computes)
    # Else a launcher or nohup wants it ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    # The file runs as __main__: its main() is taken from the module of its own name.
    path = os.path.relpath(os.path.realpath(file), _ROOT)
    name = os.path.splitext(path)[0].replace(os.sep, ".")

    @one_line()
    def main():
        command = importlib.import_module(name).main
        if _interrupted is not None:
            raise KeyboardInterrupt  # an import has swallowed it
        return command()

    finish(main)


def _set_variables(computes):
    """Set variables that libraries read once, unless the user has set them."""
    # Before torch is imported: OpenMP reads its variable once.
    limit = cores.limited() if computes else None
    if limit is not None:
        for variable in _OF_CORES:
            os.environ.setdefault(variable, str(limit))
    for variable, value, others in _OF_CUDA:
        if not any(name in os.environ for name in (variable, *others)):
            os.environ[variable] = value


def one_line(again=AGAIN):
    """Decorate main() to end with one line and an exit code where the input, an output or Ctrl-C
    ends it.

    Args:
        again: what to do once the fault is mended, or a function that returns it.
    """

    def decorate(main):
        @functools.wraps(main)
        def guarded(*arguments, **keywords):
            try:
                return main(*arguments, **keywords)
            except (Exception, KeyboardInterrupt) as error:
                # A library may make something else of a KeyboardInterrupt.
                interrupted = isinstance(error, KeyboardInterrupt) or _interrupted is not None
                if not interrupted and isinstance(error, OneLineError):
                    return fail(error, error.code)
                fault = machine_faults.in_words(error) if isinstance(error, RuntimeError) else None
                if not interrupted and not isinstance(error, OSError) and fault is None:
                    raise
                then = again() if callable(again) else again
                if interrupted:
                    return fail(f"interrupted; {then}", FAILED)
                if fault is not None:
                    return fail(f"{fault}, then {then}", FAILED)
                return fail(_of_system(error, then), FAILED)

        return guarded

    return decorate


def _of_system(error, then):
    """Return the line for an OSError: place, fault, and the remedy before what to do `then`."""
    place = "" if error.filename is None else f"{error.filename}: "
    text = error.strerror or str(error) or type(error).__name__
    fault = " ".join(text.splitlines())
    remedy = _REMEDIES.get(error.errno, "fix this")
    return f"{place}{fault}; {remedy}, then {then}"


def fail(message, code):
    """Print why a command fails on stderr, and return its exit code.

    Args:
        message: the line; an empty one if another rank prints it, which is left time to do so.
        code: the exit code.
    """
    if str(message):
        print(message, file=sys.stderr, flush=True)
    elif code != STOPPED:  # after a stop all ranks have taken leave of each other
        ending = _connected()
        if ending is not None:
            ending.leave_quietly(code)
        time.sleep(2.0)
    return code


def finish(main):
    """Call `main` and end the process with the exit code that it returns; None is 0.

    One of several connected ranks exits at once, as others may be gone; if another failed, that one
    prints first.
    """
    try:
        code = main() or DONE
    except SystemExit as exit:  # argparse's
        code = exit.code
    except Exception as error:
        ending = _connected()
        if ending is None:
            raise
        code = FAILED
        ending.leave_if_peer_lost(error, code)
        traceback.print_exc()
    # A full disk shows only now where output is redirected into a file.
    not_written = one_line()(sys.stdout.flush)()
    code = code or not_written or DONE
    if _connected() is not None:
        os._exit(code)
    _ignore_signals(code)
    if signal.getsignal(signal.SIGINT) is _interrupt:  # Ctrl-C while Python shuts down
        signal.signal(signal.SIGINT, lambda *_: os._exit(code))
    sys.exit(code)


def _ignore_signals(code):
    """Keep a run's exit code from signals that come while Python shuts down.

    Its own handlers do not count any more then, and the process would end by the signal.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        is_handled = signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN, _interrupt)
        if is_handled or code == STOPPED:
            signal.signal(number, signal.SIG_IGN)


def _interrupt(number, frame):
    """Handle Ctrl-C: the first raises KeyboardInterrupt, the next ends the process at once."""
    global _interrupted
    if _interrupted is None:
        _interrupted = time.monotonic()
        raise KeyboardInterrupt
    if time.monotonic() - _interrupted > _SAME_SECONDS:
        os._exit(FAILED)


class _Stream(io.FileIO):
    """stdout or stderr: after a failed write the rest is dropped; a closed pipe is no failure."""

    def write(self, data):
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if error.errno == errno.EPIPE:
                return len(data)
            place = {1: "standard output", 2: "standard error"}[self.fileno()]
            raise OSError(error.errno, error.strerror, place) from None


def _open_streams():
    """Replace stdout and stderr; open those that were closed, or the next file would take their
    number.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Takes the lowest number that is free.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for number, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)
        # Not strict: names may hold anything.
        keywords: Dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}
        if before is not None:
            before.flush()
            for keyword in ("encoding", "line_buffering", "write_through"):
                keywords[keyword] = getattr(before, keyword)
        raw = _Stream(number, "w", closefd=False)
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), **keywords))


def _connected():
    """Return the module parallel.ending while this process is one of several ranks, else None."""
    ending = sys.modules.get("parallel.ending")
    return ending if ending and ending.connected() else None

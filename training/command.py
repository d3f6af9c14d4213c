"""What the commands share: a command line whose complaints are one line, and how they end. Loads nothing heavy."""

import argparse
import os
import sys
import time
import traceback

from recipe.errors import FAILED, STOPPED, WRONG_INPUT, ConfigError


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other error is said."""

    def error(self, message):
        self.exit(WRONG_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def naming(config, function, recipe):
    """Calls function(recipe); puts the recipe's file before the complaint about what it says."""
    try:
        return function(recipe)
    except ConfigError as error:
        raise ConfigError(f"{config}: {error}" if str(error) else "") from None


def fail(message, code):
    """Says why, on stderr; returns `code`. An empty message means that another rank says it.

    Then that one is given time: a rank that ends takes all others with it, and they may still be closing files.
    """
    if str(message):
        print(message, file=sys.stderr, flush=True)
    elif code != STOPPED:  # after a stop all ranks have taken leave of each other
        processes = _connected()
        if processes is not None:
            processes.leave_quietly(code)
        time.sleep(2.0)
    return code


def finish(main):
    """Calls main() and ends the process with the exit code that it returns.

    One of several ranks that are still connected leaves at once: to take leave of ranks that may be gone would wait
    for them. If it is only another that failed, it lets that one speak first.
    """
    try:
        code = main()
    except Exception as error:
        processes = _connected()
        if processes is None:
            raise
        code = FAILED
        if processes.lost_peer(error):
            time.sleep(1.0)
            processes.leave(f"{processes.name()}: lost another rank; leaving", code)
        traceback.print_exc()
    if _connected() is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _connected():
    """The module parallel.processes while this process is one of several ranks, else None."""
    processes = sys.modules.get("parallel.processes")
    return processes if processes is not None and processes.connected() else None

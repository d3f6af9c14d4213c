"""What the commands share: exit codes and a command line whose complaints are one line. Loads nothing heavy."""

import argparse

DONE, FAILED, WRONG_INPUT, STOPPED = 0, 1, 2, 75


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other error is said."""

    def error(self, message):
        self.exit(WRONG_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")

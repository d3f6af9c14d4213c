"""What exchanges for slow networks learn: an experiment of benchmarks/evidence."""

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from training.command import run

    run(__file__)

from benchmarks.evidence.__main__ import command

main = command("exchange_learning")

"""Photographs at batches of 768 to 6144: an experiment of benchmarks/evidence."""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

from benchmarks.evidence.__main__ import command

main = command("photographs")

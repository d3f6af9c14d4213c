"""Cost of gradients that are applied some steps late: an experiment of benchmarks/evidence."""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

from benchmarks.evidence.__main__ import command

main = command("staleness")

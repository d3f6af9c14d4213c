"""Does anything that reads files crash, hang or grow when they are damaged?

    python -m benchmarks.fuzz [--inputs N] [--seed N] [--target NAME ...] [--quick] [--json]

Recipes, overrides, images, tar shards with their manifests and indexes, ImageNet's devkits, run
folders, studies, checkpoints, safetensors and exported programs are damaged at random, and read.
Each input must be taken, or refused by the error that is promised. Some damage is pickles and texts
that call a function here if a reader runs them. Half of the overrides, orientations and names in
tars are not damaged, but made at random: these must be read as they are typed, as Pillow reads
them, and completely. The seed is printed: the same seed gives the same inputs. Memory growth is the
slope over the second half of a target's inputs.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import random
from typing import List

from benchmarks import claims
from benchmarks.fuzz import trial
from benchmarks.fuzz.targets import TARGETS
from common.command import Parser
from common.errors import DONE, FAILED


def main() -> int:
    """Run the command; return its exit code."""
    options = claims.begin(_parser(), takes="3 minutes for 60,000 inputs", quick="half a minute")
    inputs = options.inputs or claims.less(60_000, 3_000)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)

    # Each target gets its share of the inputs, and faults are printed as they are found.
    shares = sum(TARGETS[name].share for name in options.target)
    rows = []
    for name in claims.progress(options.target, "target"):
        share = TARGETS[name].share / shares
        row, faults = trial.run(name, seed, max(1, round(inputs * share)))
        for fault in faults:
            print(f"{name}, input {fault.number}: {fault.kind}: {fault.text}", flush=True)
        rows.append(row)

    claims.report("fuzz", rows, _claims(rows), options.json)
    is_sound = all(row["crashed_hung_or_other"] == row["executed"] == 0 for row in rows)
    return DONE if is_sound else FAILED


def _parser() -> Parser:
    """Return the parser of the command line."""
    parser = claims.parser(__doc__)
    parser.add_argument(
        "--inputs",
        type=int,
        metavar="N",
        help="of all targets together (60,000)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=None,
        metavar="N",
        help="of the damage (drawn, and told)",
    )
    parser.add_argument(
        "--target",
        nargs="+",
        choices=list(TARGETS),
        default=list(TARGETS),
        metavar="NAME",
    )
    return parser


def _claims(rows: List[dict]) -> List[dict]:
    """Return the claims about all targets together."""
    inputs = sum(row["inputs"] for row in rows)
    faults = sum(row["crashed_hung_or_other"] for row in rows)
    executed = sum(row["executed"] for row in rows)
    growth = max(row["growth_kb_per_1000"] for row in rows)
    return [
        claims.claim("inputs", [inputs], "inputs", ">= 10000"),
        claims.claim("crashes_hangs_and_other_errors", [faults], "inputs", "<= 0"),
        claims.claim("executed", [executed], "inputs", "<= 0"),
        claims.claim("memory_growth", [growth], "kB per 1,000 inputs", "<= 512"),
    ]

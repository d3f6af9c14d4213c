"""Does anything that reads files crash, hang or grow when they are damaged?

    python -m benchmarks.fuzz [--inputs N] [--seed N] [--target NAME ...] [--quick] [--json]

Recipes, overrides, images, tar shards with their manifests and indexes, ImageNet's devkits, run folders, studies,
checkpoints, safetensors and exported programs are damaged at random, and read. Each input must be taken, or refused by
the error that is promised. Some damage is pickles and texts that call a function here if a reader runs them. Half of
the overrides, orientations and names in tars are not damaged, but made at random: these must be read as they are typed,
as Pillow reads them, and completely. The seed is printed: the same seed gives the same inputs. Memory growth is the
slope over the second half of a target's inputs.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import random

from benchmarks import claims
from benchmarks.fuzz import trial
from benchmarks.fuzz.targets import TARGETS
from common.errors import DONE, FAILED


def main() -> int:
    parser = claims.parser(__doc__)
    parser.add_argument("--inputs", type=int, metavar="N", help="of all targets together (60,000)")
    parser.add_argument("--seed", type=int, default=None, metavar="N", help="of the damage (drawn, and told)")
    parser.add_argument("--target", nargs="+", choices=list(TARGETS), default=list(TARGETS), metavar="NAME")
    options = claims.begin(parser, takes="3 minutes for 60,000 inputs", quick="half a minute")
    inputs = options.inputs or claims.less(60_000, 3_000)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", flush=True)
    shares = sum(TARGETS[name].share for name in options.target)
    rows = []
    for name in claims.progress(options.target, "target"):
        row, faults = trial.run(name, seed, max(1, round(inputs * TARGETS[name].share / shares)))
        for fault in faults:
            print(f"{name}, input {fault.number}: {fault.kind}: {fault.text}", flush=True)
        rows.append(row)
    total = {key: sum(row[key] for row in rows) for key in ("inputs", "crashed_hung_or_other", "executed")}
    growth = max(row["growth_kb_per_1000"] for row in rows)
    made = [
        claims.claim("inputs", [total["inputs"]], "inputs", ">= 10000"),
        claims.claim("crashes_hangs_and_other_errors", [total["crashed_hung_or_other"]], "inputs", "<= 0"),
        claims.claim("executed", [total["executed"]], "inputs", "<= 0"),
        claims.claim("memory_growth", [growth], "kB per 1,000 inputs", "<= 512"),
    ]
    claims.report("fuzz", rows, made, options.json)
    return FAILED if total["crashed_hung_or_other"] + total["executed"] else DONE

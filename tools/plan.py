"""Prints what a recipe would do: python -m tools.plan --config FILE [--json] [section.key=value ...]

It is the plan of `train.py --dry-run`. With --json the last line is one JSON object: the batch, and where run.device is
ipu every option that PopTorch would be given, and the optimizer. Exit codes: 0 done, 2 the input is wrong.
"""

import dataclasses
import json
import sys
from typing import Optional, Sequence

from recipe import batch, ipu_plan, loading
from recipe.config import Recipe
from recipe.errors import DONE, WRONG_INPUT, UserError
from training.command import Parser, fail, naming


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs the command; returns its exit code."""
    parser = Parser(prog="python -m tools.plan", description="Check a recipe and print its plan.")
    parser.add_argument("--config", required=True, metavar="FILE", help="recipe")
    parser.add_argument("--json", action="store_true", help="end with one JSON object in one line")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replaces a key of the recipe")
    options = parser.parse_intermixed_args(arguments)
    try:
        recipe = loading.load(options.config, options.overrides)
        print(naming(options.config, batch.describe, recipe))
        if options.json:
            print(json.dumps(as_data(recipe)))
    except UserError as error:
        return fail(error, WRONG_INPUT)
    return DONE


def as_data(recipe: Recipe) -> dict:
    """The plan as JSON has it; other devices than IPUs have no options."""
    division = batch.planned(recipe)
    numbers = {key.rstrip("_"): value for key, value in dataclasses.asdict(division).items()}
    rest = ipu_plan.as_data(recipe, division) if recipe.run.device == "ipu" else {"options": [], "optimizer": {}}
    return {"batch": numbers, **rest}


if __name__ == "__main__":
    sys.exit(main())

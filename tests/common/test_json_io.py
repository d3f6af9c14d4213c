"""JSON that is written has no NaN: null stands for what is not finite."""

import json
from pathlib import Path

import pytest

from common.json_io import json_text
from tests.conftest import PRODUCT, ROOT

# Files whose JSON is a key, a digest, a message, text or a setting, and has no measured numbers.
_OTHERS = {
    "common/json_io.py",
    "recipe/section.py",
    "recipe/schema.py",
    "recipe/ipu/rules.py",
    "common/cpp_compiler.py",
    "training/loggers.py",
    "training/elastic.py",
    "training/manifest.py",
    "common/binaries.py",
    "engines/ahead.py",
    "engines/ahead_worker.py",
    "engines/cache.py",
    "engines/own_loop.py",
    "parallel/board.py",
    "parallel/generations.py",
    "data/shard_index.py",
    "tools/packing.py",
    "tools/exporting.py",
    "tools/reporting/page.py",
    "tools/sweeping/study.py",
    "tools/sweeping/candidates.py",
    "tools/sweeping/folder.py",
}


def strict(text):
    def refuse(name):
        pytest.fail(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_what_is_not_finite_becomes_null_however_deep():
    value = {
        "a": float("nan"),
        "b": [1.5, (float("inf"), {"c": -float("inf")})],
        "d": True,
        "e": "NaN",
        "f": None,
    }
    found = strict(json_text(value, indent=1))
    assert found == {"a": None, "b": [1.5, [None, {"c": None}]], "d": True, "e": "NaN", "f": None}


def test_every_file_that_writes_measured_numbers_writes_them_by_it():
    files = [
        ROOT / "evaluate.py",
        ROOT / "train.py",
        *(file for room in PRODUCT for file in Path(ROOT, room).rglob("*.py")),
    ]
    found = {file.relative_to(ROOT).as_posix() for file in files if "json.dump" in file.read_text()}
    assert found <= _OTHERS

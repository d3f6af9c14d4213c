"""What the IPU path imports, and the tests that run with it on Python 3.8, use nothing newer; read, not run.

tests/test_imports.py parses the same files with 3.8's grammar and looks at annotations; here vermin looks for
modules, functions and arguments.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_imports import ON_IPU, ROOT, ours

pytest.importorskip("vermin", reason="vermin is in requirements.txt, not in requirements-ipu.txt")


def vermin(*arguments):
    """(exit code, output) of vermin: 1 if something is newer than Python 3.8."""
    command = [Path(sys.executable).with_name("vermin"), "--no-config-file", "--target=3.8-", "--violations"]
    # `long` was a type of Python 2; here it is a tensor's method.
    ended = subprocess.run([*command, "--no-tips", "--exclude", "long", *arguments], capture_output=True, text=True)
    return ended.returncode, ended.stdout + ended.stderr


def _tests_of_the_environment():
    """The files of the command by which ./run_tests.sh --ipu-environment runs tests."""
    script = (ROOT / "run_tests.sh").read_text(encoding="utf-8")
    paths = re.findall(r"tests/[a-z_0-9/.]+", script[script.index("-m pytest") : script.index("make_environment\nsel")])
    assert "tests/ipu" in paths and "tests/test_train.py" in paths
    return [*paths, "tests/conftest.py", "tests/tensors.py", "tests/ipu_environment.py"]


def test_nothing_is_newer():
    product = [path for path in ours() if path.startswith(ON_IPU)]
    assert {"train.py", "engines/ipu_engine.py", "recipe/config.py"} <= set(product)
    code, output = vermin(*(ROOT / path for path in [*product, *_tests_of_the_environment()]))
    assert code == 0 and "File with incompatible versions" not in output, output


def test_annotations_of_the_schema_are_not_newer():
    """pydantic evaluates them also where `from __future__ import annotations` keeps Python from doing so."""
    schema = [path for path, source in ours().items() if path.startswith("recipe/") and "(Section)" in source]
    assert "recipe/config.py" in schema
    code, output = vermin("--eval-annotations", *(ROOT / path for path in schema))
    assert code == 0, output


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("import graphlib", ()),
        ("''.removeprefix('a')", ()),
        ("import math\nmath.lcm(2, 3)", ()),
        ("from __future__ import annotations\nx: dict[str, int]", ("--eval-annotations",)),
    ],
)
def test_newer_code_is_found(tmp_path, source, arguments):
    path = tmp_path / "newer.py"
    path.write_text(source + "\n")
    code, output = vermin(*arguments, path)
    assert code == 1 and "requires !2, 3.9" in output
    assert not arguments or vermin(path)[0] == 0

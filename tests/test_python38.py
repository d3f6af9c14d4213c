"""What the IPU path imports, and its tests, use nothing newer than Python 3.8; read by vermin, not
run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytest.importorskip("vermin", reason="vermin is in requirements.txt, not in requirements-ipu.txt")

ON_IPU = (
    "common/", "recipe/", "models/", "optim/", "data/", "training/", "parallel/topology.py", "parallel/hosts.py",
    "parallel/launchers.py",
    "engines/base.py", "engines/factory.py", "engines/ipu_", "train.py", "evaluate.py", "tools/launch.py",
    "tools/plan.py", "tools/planning/", "parallel/costs.py", "parallel/exchange.py", "parallel/dense.py",
    "parallel/topk.py", "parallel/processes.py", "parallel/joining.py", "parallel/watch.py", "parallel/ending.py",
)  # fmt: skip


def vermin(*arguments):
    """(exit code, output) of vermin: 1 if something is newer than Python 3.8."""
    command = [
        Path(sys.executable).with_name("vermin"),
        "--no-config-file",
        "--target=3.8-",
        "--violations",
    ]
    # `long` was a type of Python 2; here it is a tensor's method. No comment exempts a line, and to
    # look for them takes a fifth of the time.
    command += ["--no-tips", "--exclude", "long", "--no-parse-comments"]
    ended = subprocess.run([*command, *arguments], capture_output=True, text=True)
    return ended.returncode, ended.stdout + ended.stderr


def of_the_environment():
    """The files of the command by which ./run_tests.sh --ipu-environment runs tests."""
    script = (ROOT / "run_tests.sh").read_text(encoding="utf-8")
    paths = re.findall(
        r"tests/[a-z_0-9/.]+",
        script[script.index("-m pytest") : script.index("make_environment\nsel")],
    )
    assert "tests/ipu" in paths and "tests/test_train.py" in paths
    return [
        ROOT / path
        for path in (*paths, "tests/conftest.py", "tests/tensors.py", "tests/ipu_environment.py")
    ]


def assert_not_newer(*arguments):
    code, output = vermin(*arguments)
    assert code == 0 and "File with incompatible versions" not in output, output


def test_nothing_that_ipus_need_is_newer():
    """Of annotations only those count that pydantic evaluates, in every schema; ruff looks at those
    of functions."""
    paths = (path for pattern in ("*.py", "*/**/*.py") for path in ROOT.glob(pattern))
    product = [path for path in paths if path.relative_to(ROOT).as_posix().startswith(ON_IPU)]
    schema = [path for path in product if "(Section)" in path.read_text(encoding="utf-8")]
    assert ROOT / "engines" / "ipu_engine.py" in product and ROOT / "recipe" / "config.py" in schema
    assert_not_newer(*(path for path in product if path not in schema))
    assert_not_newer("--eval-annotations", *schema)


@pytest.mark.slow
def test_no_test_of_the_ipu_environment_is_newer():
    """Where there is a Python 3.8 they are run by it."""
    assert_not_newer(*of_the_environment())

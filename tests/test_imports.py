"""Which rooms may import which: the contracts of .importlinter, and rules that it cannot
express."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import world
from tests.conftest import ROOT

# Present on some machines only, or slow to load and seldom needed: imported in the functions that
# use them.
OPTIONAL = (
    "poptorch", "popdist", "horovod", "nvidia.dali", "triton", "tensorboard", "torch.utils.tensorboard", "optuna",
    "matplotlib", "plotly", "rich", "fsspec", "aiohttp", "scipy", "onnx", "onnxscript", "onnxruntime",
    "wandb", "mlflow", "sqlalchemy", "datasets", "pyarrow",
)  # fmt: skip
LOAD = """
import importlib, sys
sys.modules.update(dict.fromkeys(sys.argv[1].split()))  # importing one of these is an error
for name in sys.argv[2:]:
    importlib.import_module(name)
"""
# They import with them the files of all rooms that runs need.
NEEDED = (
    "train evaluate training.run training.scoring training.exported tools.plan tools.exporting "
    "engines.torch_engine parallel.pipeline parallel.topk"
)
# Their arguments are seen before torch is loaded.
COMMANDS = (
    "train evaluate tools.batch tools.curves tools.doctor tools.export tools.launch tools.plan "
    "tools.report tools.sweep"
)


def _import_ours_without_the_others(rank, size):
    """Import our files once more, in a process that has loaded what they need."""
    ours = ("train", "evaluate", *(path.parent.name for path in ROOT.glob("*/__init__.py")))
    for name in list(sys.modules):
        if f"{name}.".startswith(tuple(f"{other}." for other in (*ours, *OPTIONAL))):
            del sys.modules[name]
    sys.modules.update(dict.fromkeys(OPTIONAL))  # importing one of these is an error
    for name in NEEDED.split():
        importlib.import_module(name)


@pytest.mark.multiprocess
def test_our_files_import_no_optional_package():
    """Whether those that we need import one is seen in a process that has loaded none: most of it
    goes to torch."""
    world.run(1, _import_ours_without_the_others, connect=False)


@pytest.mark.parametrize(
    ("absent", "names"),
    [pytest.param(" ".join(OPTIONAL), NEEDED, marks=pytest.mark.slow), ("torch", COMMANDS)],
)
def test_packages_are_imported_where_they_are_used(absent, names):
    command = [sys.executable, "-c", LOAD, absent, *names.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_commands_import_no_other_command():
    for name in ("train.py", "evaluate.py"):
        source = (ROOT / name).read_text()
        assert not re.search(
            r"^ *(from|import) (tools|benchmarks|train|evaluate)\b", source, re.MULTILINE
        ), name


def test_our_rooms_keep_the_contracts():
    pytest.importorskip(
        "importlinter", reason="import-linter is in requirements.txt, not in requirements-ipu.txt"
    )
    command = [
        Path(sys.executable).with_name("lint-imports"),
        "--config",
        ROOT / ".importlinter",
        "--no-cache",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    contracts = re.findall(r" (KEPT|BROKEN)(?: \(2 ignored imports\))?$", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and contracts == ["KEPT"] * 5, done.stdout

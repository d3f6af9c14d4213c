"""`pip install .` beside a project whose folders have the names of ours."""

import importlib.util
import re
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT

_SPEC = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
setup = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(setup)
PROGRAM = """
import importlib, pkgutil, sys
import data, models, tools
assert (data.OWN, models.OWN, tools.OWN) == (1, 2, 3)
import torch
import largebatch
assert largebatch.__version__ == sys.argv[2]
module = torch.nn.Linear(4, 2)
optimizer = largebatch.DistributedOptimizer(module, {"optimizer": {"name": "lars"}})
optimizer.backward(module(torch.ones(3, 4)).square().mean())
assert optimizer.step(lr=0.1)
for found in pkgutil.walk_packages(largebatch.__path__, "largebatch."):
    if "kernels." not in found.name and found.name != "largebatch.recipe.schema":
        importlib.import_module(found.name)
from largebatch.models.families import build
from largebatch.recipe import loading
recipe = loading.load(sys.argv[1], [])
assert sum(each.numel() for each in build(recipe.model, 0).parameters()) > 1e5
ours = {"common", "data", "models", "engines", "optim", "parallel", "recipe"}
assert {name for name in sys.modules if name.split(".")[0] in ours} == {"data", "models"}
"""


def succeed(command, cwd):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_package_and_the_users_folders_are_both_there(tmp_path):
    source, site, project = (tmp_path / name for name in ("source", "site", "project"))
    for room in setup.ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--target", site)
    succeed([sys.executable, "-m", "pip", "install", *options, "."], source)
    assert [path.name for path in site.iterdir() if path.suffix != ".dist-info"] == ["largebatch"]
    compiled = (".cpp", ".cu", ".h")
    sources = [
        path for room in setup.ROOMS for path in (ROOT / room).rglob("*") if path.suffix in compiled
    ]
    assert len(sources) > 2
    assert all((site / "largebatch" / path.relative_to(ROOT)).exists() for path in sources), (
        "what is compiled"
    )
    assert (site / "largebatch" / "py.typed").exists()
    for number, name in enumerate(("data", "models", "tools"), 1):
        (project / name).mkdir(parents=True)
        (project / name / "__init__.py").write_text(f"OWN = {number}\n")
    program = project / "own.py"
    program.write_text(
        PROGRAM.replace("import data", f"sys.path.append({str(site)!r})\nimport data", 1)
    )
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[
        1
    ]
    succeed([sys.executable, program, ROOT / "configs" / "quickstart.yaml", version], project)


@pytest.mark.parametrize("room", setup.ROOMS)
def test_imports_of_every_file_can_be_moved(room):
    """Afterwards no import names a room that is not in the package."""
    rooms = "|".join(setup.ROOMS)
    for path in sorted((ROOT / room).rglob("*.py")):
        text = setup.moved(path.read_text(encoding="utf-8"))
        compile(text, str(path), "exec")
        assert not re.search(rf"^ *from ({rooms})[. ]", text, re.MULTILINE), path


def test_an_import_without_a_name_in_a_package_is_refused():
    with pytest.raises(ValueError, match="import models"):
        setup.moved("import torch\nimport models.families\n")

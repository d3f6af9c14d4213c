"""Which rooms may import which: the contracts of .importlinter, and the rules that import-linter cannot express.

Everything is read from the source; no file of ours is run.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent

ROOMS = ("recipe", "models", "optim", "data", "parallel", "engines", "training", "tools", "benchmarks")
COMMANDS = ("train", "evaluate")  # files, for which import-linter has no contracts
# Present on some machines only, or slow to load and seldom needed.
OPTIONAL = (
    "poptorch", "popdist", "horovod", "nvidia.dali", "triton", "tensorboard", "torch.utils.tensorboard", "optuna",
    "matplotlib", "plotly", "rich", "fsspec", "aiohttp", "scipy", "onnx", "onnxscript", "onnxruntime",
    "wandb", "mlflow", "sqlalchemy",
)  # fmt: skip
# Files that also run on Python 3.8, which the IPU's SDK needs.
ON_IPU = (
    "recipe/", "models/", "optim/", "data/", "training/", "parallel/topology.py", "parallel/hosts.py",
    "engines/base.py", "engines/factory.py", "engines/ipu_", "train.py", "evaluate.py", "tools/launch.py",
    "tools/plan.py", "tools/planning/", "parallel/costs.py", "parallel/exchange.py", "parallel/dense.py",
    "parallel/topk.py",
)  # fmt: skip
_BUILTIN_GENERICS = ("list", "dict", "tuple", "set", "frozenset", "type")


class Import(NamedTuple):
    """One imported name, e.g. torch.nn; `at_start`: it is imported together with the file that names it."""

    name: str
    line: int
    at_start: bool


def complaints(files: Dict[str, str]) -> List[str]:
    """Broken rules in the files, given as path relative to the root -> source."""
    found, trees = [], {}
    for path, source in files.items():
        try:
            trees[path] = ast.parse(source, path, feature_version=(3, 8) if path.startswith(ON_IPU) else None)
        except SyntaxError as error:
            found.append(f"{path}:{error.lineno}: {error.msg}")
    imports = {path: list(_imports(tree)) for path, tree in trees.items()}
    needed = {
        other
        for path in imports
        for line in imports[path]
        if line.at_start
        for other in (_file(line.name, files),)
        if other and other != path
    }
    for path, tree in trees.items():
        room = path.split("/")[0] if "/" in path else path[: -len(".py")]
        if room not in (*ROOMS, *COMMANDS):
            found.append(f"{path}:1: {room} is no room")
        for name, line, at_start in imports[path]:
            target = name.split(".")[0]
            if name.startswith("."):
                found.append(f"{path}:{line}: {name} is relative; write the room's name")
            elif room in COMMANDS and target != room and target in (*COMMANDS, "tools", "benchmarks"):
                found.append(f"{path}:{line}: {room} may not import {name}")
            elif at_start and path in needed and any(f"{name}.".startswith(f"{each}.") for each in OPTIONAL):
                found.append(f"{path}:{line}: {name} at the start of a file that others need; import it in a function")
        if path.startswith(ON_IPU):
            found += [f"{path}:{line}: {what}, which Python 3.8 does not know" for line, what in _newer(tree)]
    return found


def _file(name: str, files: Dict[str, str]) -> str:
    """File that importing `name` reads: of a module, or of one that holds `name`; empty if none of ours."""
    stem = name.replace(".", "/")
    return next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if path in files), "")


def _imports(node: ast.AST, at_start: bool = True) -> Iterator[Import]:
    """Every import below `node`. `from a import b` may import the module a.b: such imports are named a.b."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, at_start) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            start = "." * child.level + (child.module or "")
            if start.strip("."):
                yield Import(start, child.lineno, at_start)
                start += "."
            yield from (Import(start + alias.name, child.lineno, at_start) for alias in child.names)
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            yield from (found._replace(at_start=False) for found in _imports(child))
        else:
            in_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _imports(child, at_start and not in_function)


def _newer(tree: ast.Module) -> Iterator[tuple]:
    """(line, source) of `list[int]` and `int | None` where Python evaluates them; vermin overlooks these."""
    postponed = any(
        isinstance(node, ast.ImportFrom) and node.module == "__future__" and node.names[0].name == "annotations"
        for node in tree.body
    )
    annotations = [
        part
        for node in ast.walk(tree)
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if annotation
        for part in ast.walk(annotation)
    ]
    skipped = set(map(id, annotations)) if postponed else set()
    for node in ast.walk(tree):
        generic = isinstance(node, ast.Subscript) and getattr(node.value, "id", None) in _BUILTIN_GENERICS
        union = isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and node in annotations
        if (generic or union) and id(node) not in skipped:
            yield node.lineno, ast.unparse(node)


def ours() -> Dict[str, str]:
    """Path -> source of every file of ours but tests, and what builds the package."""
    paths = [
        *(ROOT / f"{name}.py" for name in COMMANDS),
        *(path for room in ROOMS for path in (ROOT / room).rglob("*.py")),
    ]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}


def test_our_files_keep_the_rules():
    files = ours()
    assert {"recipe/config.py", "training/loop.py", "engines/torch_engine.py", "train.py"} <= set(files)
    assert complaints(files) == []


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("train.py", "try:\n  import tools.plan\nexcept E: pass", "train.py:2: train may not import tools.plan"),
        ("evaluate.py", "def f():\n  import train", "evaluate.py:2: evaluate may not import train"),
        ("data/a.py", "from . import b", "data/a.py:1: .b is relative; write the room's name"),
        ("data/a.py", "from ..models import b", "data/a.py:1: ..models is relative; write the room's name"),
        ("helpers/a.py", "import os", "helpers/a.py:1: helpers is no room"),
        ("scratch.py", "import os", "scratch.py:1: scratch is no room"),
        ("optim/a.py", "match x:\n  case 1: pass", "optim/a.py:2: Pattern matching"),
        ("optim/a.py", "def f(x: list[int]): pass", "optim/a.py:1: list[int], which Python 3.8 does not know"),
        ("optim/a.py", "def f() -> int | None: pass", "optim/a.py:1: int | None, which Python 3.8 does not know"),
        (
            "optim/a.py",
            "from __future__ import annotations\nX = dict[str, int]",
            "optim/a.py:2: dict[str, int], which Python 3.8 does not know",
        ),
        ("train.py", "x: int | None = None", "train.py:1: int | None, which Python 3.8 does not know"),
        ("models/a.py", "import torch, timm\nfrom recipe.config import Model\nfrom models import stages", None),
        ("engines/torch_engine.py", "match x:\n  case 1: pass\ndef f(x: list[int]) -> int | None: pass", None),
        (
            "data/a.py",
            "from __future__ import annotations\ndef f(x: list[int], y: int | None) -> dict[str, int]: 0",
            None,
        ),
        ("data/a.py", "x = flags | 3\ny = z[int]", None),
        ("data/a.py", "import database, optimal, training_data", None),
    ],
)
def test_broken_rules_are_found_and_others_let_through(path, source, complaint):
    found = complaints({path: source + "\n"})
    assert found[0].startswith(complaint) if complaint else found == []


@pytest.mark.parametrize("name", OPTIONAL)
def test_optional_packages_are_imported_where_they_are_used(name):
    """A file that is itself only imported when it is used may import them at its start."""
    path, (package, _, last) = "data/special.py", name.rpartition(".")
    ways = [f"import {name}", f"from {name} import x", f"if x:\n    import {name}.x"]
    ways += [f"from {package} import {last}"] if package else []
    at_start = ["import data.special", "from data.special import x", "from data import special"]
    later = [f"def f():\n    {at_start[1]}", f"import typing\nif typing.TYPE_CHECKING:\n    {at_start[0]}"]
    for way in ways:
        for user in at_start:
            found = complaints({path: way, "training/a.py": user})
            assert name in found[0] and found[0].endswith("; import it in a function"), found
        inside = "def f():\n    " + way.replace("\n", "\n    ")
        assert complaints({path: inside, "training/a.py": at_start[0]}) == []
        assert [complaints({path: way, "training/a.py": user}) for user in later] == [[], []]


def lint_imports(folder):
    """(exit code, {contract: kept}) of .importlinter for the rooms in `folder`."""
    pytest.importorskip("importlinter", reason="import-linter is in requirements.txt, not in requirements-ipu.txt")
    command = [Path(sys.executable).with_name("lint-imports"), "--config", ROOT / ".importlinter", "--no-cache"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    verdicts = re.findall(r"^(.*) (KEPT|BROKEN)$", ended.stdout, re.MULTILINE)
    return ended.returncode, {name: verdict == "KEPT" for name, verdict in verdicts}, ended.stdout


def test_our_rooms_keep_the_contracts():
    code, verdicts, output = lint_imports(ROOT)
    assert code == 0 and len(verdicts) == 5 and all(verdicts.values()), output


def test_every_contract_finds_what_breaks_it(tmp_path):
    """Each import that a room may not have, in a tree of empty rooms."""
    for room in ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").touch()
    for path in (ROOT / "engines").glob("ipu_*.py"):  # allowed importers
        (tmp_path / "engines" / path.name).touch()
    middle = ("models", "optim", "data", "parallel")
    levels = [("recipe",), middle, ("engines",), ("training",), ("tools",), ("benchmarks",)]
    illegal = []
    for number, level in enumerate(levels):
        above = [other for higher in levels[number:] for other in higher]
        illegal += [(room, other) for room in level for other in above if other != room]
    for room, other in illegal:
        (tmp_path / room / f"imports_{other}.py").write_text(f"def f():\n    import {other}\n")
    extra = {
        "recipe": "import torch.nn as nn, numpy",
        "data": "import train",
        "tools": "import poptorch, popdist, horovod.torch",
    }
    for room, line in extra.items():
        (tmp_path / room / "extra.py").write_text(line + "\n")
    code, verdicts, output = lint_imports(tmp_path)
    assert code == 1 and len(verdicts) == 5 and not any(verdicts.values()), output
    for room, other in illegal:
        assert f"{room} is not allowed to import {other}" in output, (room, other)

"""Who may import whom (docs/architecture.md): read from the source of every file, without running any."""

import ast
from fnmatch import fnmatch
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A room may import itself and the rooms listed with it.
_MIDDLE = ("models", "optim", "data", "parallel")
_BELOW_COMMANDS = ("recipe", *_MIDDLE, "engines", "training")
ALLOWED = {
    "recipe": (),
    **dict.fromkeys(_MIDDLE, ("recipe",)),
    "engines": ("recipe", *_MIDDLE),
    "training": ("recipe", *_MIDDLE, "engines"),
    **dict.fromkeys(("train", "evaluate", "tools"), _BELOW_COMMANDS),
    "benchmarks": (*_BELOW_COMMANDS, "tools"),
}
# A wrong recipe is refused before these are loaded.
SLOW = ("torch", "numpy", "timm", "torchvision")
# Present on some machines only, or slow to load and seldom needed.
OPTIONAL = (
    "poptorch", "popdist", "horovod", "nvidia.dali", "triton", "tensorboard", "torch.utils.tensorboard", "optuna",
    "matplotlib", "plotly", "rich", "fsspec", "aiohttp", "scipy", "onnx", "onnxscript", "onnxruntime",
    "wandb", "mlflow", "sqlalchemy",
)  # fmt: skip
# What comes with the IPU's SDK, and the only files that may import it, be it in a function.
OF_THE_SDK = {"poptorch": "engines/ipu_engine.py", "popdist": "engines/ipu_engine.py", "horovod": "engines/ipu_*.py"}
# What also runs on Python 3.8, which the IPU's SDK needs.
ON_IPU = (
    "recipe/", "models/", "optim/", "data/", "training/", "parallel/topology.py", "parallel/hosts.py",
    "engines/base.py", "engines/factory.py", "engines/ipu_", "train.py", "evaluate.py", "tools/launch.py",
    "tools/plan.py", "tools/planning/", "parallel/costs.py",
)  # fmt: skip
_BUILTIN_GENERICS = ("list", "dict", "tuple", "set", "frozenset", "type")


class Import(NamedTuple):
    """One imported name, e.g. torch.nn; `at_start`: it is imported together with the file that says so."""

    name: str
    line: int
    at_start: bool


def complaints(files: Dict[str, str]) -> List[str]:
    """What is wrong with the files, given as path relative to the root -> source."""
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
        room = _room(path)
        if room not in ALLOWED:
            found.append(f"{path}:1: {room} is no room")
            continue
        for name, line, at_start in imports[path]:
            target = name.split(".")[0]
            if name.startswith("."):
                found.append(f"{path}:{line}: {name} is relative; write the room's name")
            elif target in ALLOWED and target not in (room, *ALLOWED[room]):
                found.append(f"{path}:{line}: {room} may not import {name}")
            elif room == "recipe" and _is_of(name, SLOW):
                found.append(f"{path}:{line}: recipe may not import {name}")
            elif target in OF_THE_SDK and not fnmatch(path, OF_THE_SDK[target]):
                found.append(f"{path}:{line}: only {OF_THE_SDK[target]} may import {name}")
            elif at_start and path in needed and _is_of(name, OPTIONAL):
                found.append(f"{path}:{line}: {name} at the start of a file that others need; import it in a function")
        if path.startswith(ON_IPU):
            found += [f"{path}:{line}: {what}, which Python 3.8 does not know" for line, what in _newer(tree)]
    return found


def _room(path: str) -> str:
    return path.split("/")[0] if "/" in path else path[: -len(".py")]


def _file(name: str, files: Dict[str, str]) -> str:
    """The file that importing `name` reads: of a module, or of one that holds `name`; empty if none of ours."""
    stem = name.replace(".", "/")
    return next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if path in files), "")


def _is_of(name: str, packages) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


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
    """(line, what): `list[int]` and `int | None` where Python evaluates them."""
    postponed = any(
        isinstance(node, ast.ImportFrom) and node.module == "__future__" and node.names[0].name == "annotations"
        for node in tree.body
    )
    annotations = [
        annotation
        for node in ast.walk(tree)
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if annotation
    ]
    skipped = {id(part) for annotation in annotations for part in ast.walk(annotation)} if postponed else set()
    for node in ast.walk(tree):
        generic = isinstance(node, ast.Subscript) and getattr(node.value, "id", None) in _BUILTIN_GENERICS
        if generic and id(node) not in skipped:
            yield node.lineno, ast.unparse(node)
    for part in (part for annotation in annotations for part in ast.walk(annotation)):
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.BitOr) and not postponed:
            yield part.lineno, ast.unparse(part)


def ours() -> Dict[str, str]:
    paths = [*ROOT.glob("*.py"), *(path for room in ALLOWED for path in (ROOT / room).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}


def test_our_files_keep_the_rules():
    files = ours()
    assert {"recipe/config.py", "training/loop.py", "engines/torch_engine.py", "train.py"} <= set(files)
    assert complaints(files) == []


def test_directions():
    rooms = list(ALLOWED)
    chain = [["recipe"], list(_MIDDLE), ["engines"], ["training"], ["train", "evaluate", "tools"], ["benchmarks"]]
    level = {room: number for number, group in enumerate(chain) for room in group}
    for room in rooms:
        for other in rooms:
            found = complaints({f"{room}/a.py": f"import {other}.b\n"})
            allowed = room == other or (level[other] < level[room] and other not in ("train", "evaluate"))
            assert found == ([] if allowed else [f"{room}/a.py:1: {room} may not import {other}.b"])


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("models/a.py", "from optim import lars", "models/a.py:1: models may not import optim"),
        ("models/a.py", "def f():\n  from optim.lars import LARS", "models/a.py:2: models may not import optim.lars"),
        ("models/a.py", "class A:\n  import data", "models/a.py:2: models may not import data"),
        ("train.py", "try:\n  import tools.plan\nexcept E: pass", "train.py:2: train may not import tools.plan"),
        ("recipe/a.py", "import train", "recipe/a.py:1: recipe may not import train"),
        ("recipe/a.py", "import torch.nn as nn", "recipe/a.py:1: recipe may not import torch.nn"),
        ("recipe/a.py", "def f():\n  import numpy as np", "recipe/a.py:2: recipe may not import numpy"),
        (
            "engines/a.py",
            "def f():\n  import poptorch",
            "engines/a.py:2: only engines/ipu_engine.py may import poptorch",
        ),
        ("engines/ipu_a.py", "import popdist.poptorch", "engines/ipu_a.py:1: only engines/ipu_engine.py may import"),
        ("training/a.py", "from horovod import torch", "training/a.py:1: only engines/ipu_*.py may import horovod"),
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
    ],
)
def test_a_broken_rule_is_found(path, source, complaint):
    assert complaints({path: source + "\n"})[0].startswith(complaint)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("models/a.py", "import torch, timm\nfrom recipe.config import Model\nfrom models import stages"),
        ("engines/ipu_engine.py", "def f():\n  import poptorch, popdist.poptorch"),
        ("engines/ipu_a.py", "def f():\n  import horovod.torch"),
        ("engines/torch_engine.py", "match x:\n  case 1: pass\ndef f(x: list[int]) -> int | None: pass"),
        ("data/a.py", "from __future__ import annotations\ndef f(x: list[int], y: int | None) -> dict[str, int]: pass"),
        ("data/a.py", "x = flags | 3\ny = z[int]"),
        ("data/a.py", "import database, optimal, training_data"),
    ],
)
def test_what_keeps_the_rules_is_let_through(path, source):
    assert complaints({path: source + "\n"}) == []


@pytest.mark.parametrize("name", OPTIONAL)
def test_optional_packages_are_imported_where_they_are_used(name):
    """At the start of a file that is itself only imported when it is used they are welcome."""
    package, _, last = name.rpartition(".")
    room, special = ("engines", "ipu_engine") if name in OF_THE_SDK else ("data", "special")
    path = f"{room}/{special}.py"
    ways = [
        f"import {name}\n",
        f"from {name} import x\n",
        f"try:\n    import {name}.x\nexcept ImportError:\n    pass\n",
    ]
    if package:
        ways.append(f"from {package} import {last}\n")
    for way in ways:
        line = 2 if way.startswith("try") else 1
        for user in (
            f"import {room}.{special}",
            f"from {room}.{special} import x",
            f"from {room} import {special}",
            f"if x:\n  import {room}.{special}",
        ):
            found = complaints({path: way, "training/a.py": user + "\n"})
            assert len(found) >= 1
            assert found[0].startswith(f"{path}:{line}: {name}")
            assert found[0].endswith("at the start of a file that others need; import it in a function")
        inside = "def f():\n    " + way.replace("\n", "\n    ") + "\n"
        assert complaints({path: inside, "training/a.py": f"import {room}.{special}\n"}) == []
        for user in (
            f"def f():\n    from {room}.{special} import x\n",
            f"import typing\nif typing.TYPE_CHECKING:\n    import {room}.{special}\n",
        ):
            assert complaints({path: way, "training/a.py": user}) == []
        assert complaints({path: way}) == []

"""Binds the double, and what the product calls, to the table of PopTorch's signatures."""

import ast
import enum
import importlib
import inspect
import re
from pathlib import Path

import pytest

from tests.ipu.signatures import SIGNATURES

pytestmark = pytest.mark.ipu

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = sorted([*ROOT.glob("engines/ipu_*.py"), *ROOT.glob("recipe/ipu*.py")])
_TABLE = {row.name: row for row in SIGNATURES}
_ALIASES = {"hvd": "horovod.torch"}


def resolve(name):
    """What stands under a dotted name; options are looked up in an instance, for their groups are properties."""
    parts = name.split(".")
    length = 2 if name.startswith(("popdist.poptorch.", "horovod.torch.")) else 1
    found = importlib.import_module(".".join(parts[:length]))
    for number, part in enumerate(parts[length:], length):
        if inspect.isclass(found) and found.__name__ == "Options":
            found = found()
        static = inspect.getattr_static(found, part)
        last = number == len(parts) - 1
        found = static if last and isinstance(static, property) else getattr(found, part)
    return found


def described(found):
    """Parameters as the table writes them."""
    if isinstance(found, property):
        return ""
    if inspect.isclass(found) and issubclass(found, enum.Enum):
        return ", ".join(f"{member.name}={member.value!r}" for member in found)
    if inspect.isclass(found):
        found = found.__init__  # a generic class hides it in Python 3.8
    return ", ".join(_parameter(each) for each in inspect.signature(found).parameters.values() if each.name != "self")


def _parameter(parameter):
    marks = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    text = marks.get(parameter.kind, "") + parameter.name
    if parameter.default is parameter.empty:
        return text
    default = parameter.default
    return (
        f"{text}={type(default).__name__}.{default.name}" if isinstance(default, enum.Enum) else f"{text}={default!r}"
    )


@pytest.mark.parametrize("row", SIGNATURES, ids=lambda row: row.name)
def test_the_double_has_the_real_signatures(double, row):
    found = resolve(row.name)
    if row.kind in ("constant", "exception"):
        return
    assert described(found) == row.parameters
    assert isinstance(found, property) == (row.kind == "property")
    assert inspect.isclass(found) == (row.kind in ("class", "enum"))


def test_a_name_stands_once():
    assert len(_TABLE) == len(SIGNATURES)


def test_the_double_has_nothing_besides(double):
    owned = [("poptorch." + name) for name in double.__all__ if name != "optim"]
    groups = {"poptorch.Options": double.Options, "poptorch.PoplarExecutor": double.PoplarExecutor}
    for group in ("Precision", "Training", "TensorLocations", "Distributed", "_Popart"):
        groups[f"poptorch.Options.{group}"] = type(getattr(double.Options(), group))
    for prefix, kind in groups.items():
        owned += [f"{prefix}.{name}" for name in vars(kind) if not name.startswith("_")]
    assert not set(owned) - set(_TABLE)


# What the product calls


def dotted(node):
    """a.b.c of an expression, None where it is something else."""
    if isinstance(node, ast.Name):
        return _ALIASES.get(node.id, node.id)
    base = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return base and f"{base}.{node.attr}"


def called(source):
    """Names of theirs in a file: attributes of their modules, names in texts, and methods in camel case."""
    names, methods = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            if name and re.match(r"(poptorch|popdist|horovod\.torch)\.", name):
                names.add(name)
            elif re.match(r"[a-z]+[a-z0-9]*[A-Z]", node.attr):
                methods.add(node.attr)
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and re.fullmatch(r"(poptorch|popdist|Options)(\.\w+)+", text):
            names.add(re.sub(r"^Options", "poptorch.Options", text))
    return names, methods


def unknown(source):
    """Those that the table lacks; a module, a group of options or a member of an enumeration is none."""
    names, methods = called(source)
    enums = {row.name for row in SIGNATURES if row.kind == "enum"}
    known = set(_TABLE) | {
        f"{row.name}.{part.split('=')[0]}"
        for row in SIGNATURES
        for part in row.parameters.split(", ")
        if row.name in enums
    }
    prefixes = {name[: match.start()] for name in known for match in re.finditer(r"\.", name)}
    last = {name.rsplit(".", 1)[-1] for name in known}
    return sorted((names - known - prefixes) | (methods - last))


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: path.name)
def test_the_product_calls_what_the_table_has(path):
    assert unknown(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("poptorch.DataLoaderMode.Async; poptorch.optim; self.executor.setOptimizer(1); plan.learning_rate()", []),
        ("poptorch.optim.LARS", ["poptorch.optim.LARS"]),
        ("poptorch.DataLoaderMode.Fast", ["poptorch.DataLoaderMode.Fast"]),
        ("hvd.alltoall()", ["horovod.torch.alltoall"]),
        ("('Options.Training.gradientAccumulation', 'Options.enableOverlap')", ["poptorch.Options.enableOverlap"]),
        ("self.executor.copyWeights()", ["copyWeights"]),
    ],
)
def test_other_names_are_found(source, expected):
    assert unknown(source) == expected

"""`pip install .`: the rooms that a training loop of one's own can use, as one package `largebatch`.

Here the rooms are top-level folders, whose names would collide with those of other projects. In the package they are
`largebatch.models`, `largebatch.optim` and so on: the build copies the files and changes their imports of each other.
"""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

NAME = "largebatch"
ROOMS = ("common", "data", "engines", "models", "optim", "parallel", "recipe")
ROOT = Path(__file__).resolve().parent
INIT = '''"""Large-batch training: optimizers, half weights, exchanges and EfficientNets. See docs/library.md."""

from importlib.metadata import version

from largebatch.engines.own_loop import DistributedOptimizer
from largebatch.optim.lars import LARS
from largebatch.parallel.ddp_hook import SparseState, sparse_hook

__all__ = ["LARS", "DistributedOptimizer", "SparseState", "sparse_hook"]
__version__ = version("largebatch")
'''


def moved(source: str) -> str:
    """Return a file's source with its imports of a room naming it within the package."""
    rooms = "|".join(ROOMS)
    found = re.search(rf"^ *import ({rooms})\b", source, re.MULTILINE)
    if found:
        raise ValueError(
            f"write `from ROOM import NAME`: `{found.group().strip()}` cannot be moved into a package"
        )
    return re.sub(
        rf"^( *from )({rooms})\b(?=[\w.]* import )", rf"\1{NAME}.\2", source, flags=re.MULTILINE
    )


class Build(build_py):
    """Copy files, change their imports, and add the package's own names."""

    def run(self):
        super().run()
        folder = Path(self.build_lib) / NAME
        for file in folder.rglob("*.py"):
            file.write_text(moved(file.read_text(encoding="utf-8")), encoding="utf-8")
        (folder / "__init__.py").write_text(INIT, encoding="utf-8")
        (folder / "py.typed").touch()  # PEP 561: type checkers read the annotations


if __name__ == "__main__":
    found = (
        path.parent.relative_to(ROOT).as_posix()
        for room in ROOMS
        for path in (ROOT / room).rglob("__init__.py")
    )
    folders = {f"{NAME}.{folder.replace('/', '.')}": folder for folder in found}
    setup(
        packages=list(folders),
        package_dir=folders,
        package_data={
            f"{NAME}.data": ["*.npz", "*.cpp"],
            f"{NAME}.optim.kernels": ["*.cpp", "*.h"],
            f"{NAME}.models.kernels.cuda": ["*.cu", "*.h"],
            f"{NAME}.models.native": ["*.cpp", "*.h"],
        },
        cmdclass={"build_py": Build},
    )

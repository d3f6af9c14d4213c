"""Shared by all tests: a small recipe, and one thread: threads that share busy cores wait for each
other."""

import contextlib
import gc
import os
import subprocess
from pathlib import Path

import pytest
import torch

from common import files
from parallel import launchers
from recipe import loading

# Programs that tests start compute on one thread too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton reads this where a kernel is defined. Without a GPU its interpreter runs kernels on the
# CPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

ROOT = Path(__file__).resolve().parent.parent
# Folders of the product, and with the benchmarks all that is no test.
PRODUCT = (
    "common",
    "data",
    "engines",
    "models",
    "optim",
    "parallel",
    "recipe",
    "tools",
    "training",
)
ROOMS = (*PRODUCT, "benchmarks")
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
RECIPES = sorted(
    path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "sweeps"
)

# A quarter of a million parameters on digits: a step takes milliseconds.
TINY = (
    "model.width=0.25",
    "model.depth=0.1",
    "model.image_size=16",
    "data.mixup=0",
    "batch.global=24",
    "batch.micro=12",
    "batch.evaluation=180",
    "run.steps=8",
    "schedule.warmup_steps=2",
    "log.every_steps=2",
    "log.tensorboard=false",
)


def pytest_configure():
    """Programs that tests start are ranks of what the tests start, not of what started the
    tests."""
    launchers.forget(os.environ)


def pytest_collection_modifyitems(items):
    """Files that start ranks begin first, and of all others the longest, so that short ones are
    left for the end."""
    several = {item.path for item in items if item.get_closest_marker("multiprocess")}
    lengths = {path: path.stat().st_size for path in {item.path for item in items}}
    items.sort(key=lambda item: (item.path not in several, -lengths[item.path]))


def pytest_collection_finish():
    """Collections of garbage pass over what stays until the end: modules, and 6,000 tests.

    Each took 0.1 s.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """Tests neither use nor change the user's cache.

    All test runs of a checkout share their compiled libraries.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        compiled = ROOT / ".pytest_cache" / "compiled"
        with contextlib.suppress(OSError):  # a checkout that cannot be written
            compiled.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.user_cache().mkdir()
            (files.user_cache() / "compiled").symlink_to(compiled)
        yield


@pytest.fixture
def small_disk(tmp_path):
    """small_disk("8m"): the folder of a real file system of that size; only root can make one, and
    not everywhere."""
    mount = tmp_path / "disk"

    def make(size):
        mount.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", mount]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("needs root and the right to mount")
        return mount

    yield make
    if mount.is_mount():
        subprocess.run(["umount", "--lazy", mount], check=True)


@pytest.fixture
def undrawn_confusion(monkeypatch):
    """evaluate.py writes an empty file in the place of its picture, which takes longer than the
    scores.

    Returns what draws it.
    """
    from training import scoring  # late, as it loads the engines

    draw = scoring.draw_confusion

    def draw_nothing(path, *arguments):
        if isinstance(path, Path):
            path.touch()
        else:  # a report's own picture
            draw(path, *arguments)

    monkeypatch.setattr(scoring, "draw_confusion", draw_nothing)
    return draw


@pytest.fixture
def tiny():
    """tiny(*overrides): the quickstart recipe shrunk to milliseconds a step, with overrides."""
    return lambda *overrides: loading.load(QUICKSTART, [*TINY, *overrides])

"""The API page: made from docstrings whose arguments are those of the functions."""

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT


def test_the_page_names_modules_that_exist():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    modules = re.findall(r"^::: ([\w.]+)$", page, flags=re.MULTILINE)
    assert len(modules) > 10
    for module in modules:
        path = ROOT.joinpath(*module.split("."))
        assert path.with_suffix(".py").exists(), module


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    """Strictly: an argument that a docstring names and a function does not have is an error."""
    pytest.importorskip("mkdocstrings", reason="mkdocs is for Python 3.11 and newer")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    assert "DistributedOptimizer" in (tmp_path / "site" / "api" / "index.html").read_text(
        encoding="utf-8"
    )

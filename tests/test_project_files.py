"""Files that services read of the repository: GitHub's workflow and the citation."""

import re

import pytest
import yaml

from tests.conftest import ROOT

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 or newer")

# BaseLoader keeps `on` and `3.10` as the text that they are.
WORKFLOW = yaml.load(
    (ROOT / ".github" / "workflows" / "tests.yml").read_text(), Loader=yaml.BaseLoader
)
JOBS = WORKFLOW["jobs"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def steps(key):
    """Return the values of `key` in the steps of all jobs."""
    return [step[key] for job in JOBS.values() for step in job["steps"] if key in step]


def test_the_workflow_has_what_github_asks_for():
    assert set(WORKFLOW) == {"name", "on", "permissions", "concurrency", "jobs"}
    assert set(WORKFLOW["on"]) == {"push", "pull_request"}
    assert WORKFLOW["permissions"] == {"contents": "read"}
    for job in JOBS.values():
        assert re.fullmatch(r"ubuntu-\d+\.\d+", job["runs-on"]), "a fixed release"
        assert int(job["timeout-minutes"]) > 0
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])


def test_actions_are_pinned_by_version():
    uses = steps("uses")
    assert len(uses) == 2 * len(JOBS)
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+)*", action) for action in uses)


def test_the_workflow_runs_what_continuous_integration_runs_here():
    local = re.findall(r"^\./.*$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    commands = [command for command in steps("run") if command.startswith("./")]
    assert commands == local
    assert all((ROOT / command.split()[0]).stat().st_mode & 0o100 for command in commands)


def test_each_python_is_found_by_the_name_that_the_workflow_gives_it():
    script = (ROOT / "tools" / "environment.sh").read_text()
    versions = JOBS["tests"]["strategy"]["matrix"]["python"]
    assert f">={versions[0]}" == PROJECT["requires-python"]
    assert set(versions) == set(re.findall(r"python(3\.1\d)\b", script))
    assert [env["PYTHON"] for env in steps("env")] == ["python${{ matrix.python }}"] * 2 + [
        "python3.8"
    ]
    assert "${PYTHON:-}" in script
    assert all("python-version" in settings for settings in steps("with"))


def test_the_citation_has_what_its_format_asks_for():
    """Of CFF 1.2.0: the required keys. It has no version: pyproject.toml has the only one."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"] and citation["type"] == "software"
    assert citation["title"] == (ROOT / "README.md").read_text().splitlines()[0].lstrip("# ")
    assert citation["license"] == PROJECT["license"]
    holder = re.search(r"^Copyright \(c\) \d+ (.*)$", (ROOT / "LICENSE").read_text(), re.MULTILINE)[
        1
    ]
    assert citation["authors"] == [{"name": holder}]
    assert "version" not in citation

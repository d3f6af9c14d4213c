"""tools/environment.sh: uv installs by its hash; where it cannot be had, or fails, pip does, with
the same options."""

import os
import subprocess

import pytest

from tests.conftest import ROOT

# In the place of the environment's Python: writes down how pip is called, and "installs" uv unless
# told not to.
PYTHON = """#!/usr/bin/env bash
echo "pip $*" >> "$LOG"
case "$*" in
  *config*) exit 1 ;;
  *--target*)
    [ "$UV" = absent ] && exit 1
    mkdir -p "$VENV/uv/bin"
    cat > "$VENV/uv/bin/uv" <<'UV'
#!/usr/bin/env bash
echo "uv $*" >> "$LOG"
echo "index ${UV_DEFAULT_INDEX:-none}" >> "$LOG"
[ "$UV" = works ]
UV
    chmod +x "$VENV/uv/bin/uv"
    ;;
  *) [ "$PIP" = works ] ;;
esac
"""


@pytest.fixture
def install(tmp_path):
    """install(uv, pip, **variables): exit code, and the calls of uv and pip that install the
    requirements."""

    def call(uv, pip="works", **variables):
        venv = tmp_path / "venv"
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        (venv / "bin" / "python").write_text(PYTHON)
        (venv / "bin" / "python").chmod(0o755)
        log = tmp_path / "log"
        log.write_text("")
        names = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "PYTHONDONTWRITEBYTECODE")
        environment = {key: value for key, value in os.environ.items() if key not in names}
        environment.update(LOG=str(log), VENV=str(venv), UV=uv, PIP=pip, **variables)
        line = (
            f'. {ROOT}/tools/environment.sh; install "{venv}" needed.txt --require-hashes || exit 1'
        )
        command = ["bash", "-c", f"set -eu; {line}"]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        assert not (venv / "uv").exists(), "uv stays among what runs there"
        calls = [
            line
            for line in log.read_text().splitlines()
            if not line.startswith(("pip -m pip config", "index"))
        ]
        return done.returncode, [line for line in calls if "--target" not in line], log.read_text()

    return call


def test_uv_installs_alone(install, tmp_path):
    code, calls, log = install("works")
    python = tmp_path / "venv" / "bin" / "python"
    assert code == 0 and calls == [
        f"uv pip install --quiet --python {python} --require-hashes -r needed.txt"
    ]
    (fetched,) = [line for line in log.splitlines() if "--target" in line]
    assert "--require-hashes" in fetched and fetched.endswith("tools/uv.txt")


@pytest.mark.parametrize("uv", ["absent", "fails"])
def test_pip_takes_its_place(install, uv):
    code, calls, _ = install(uv)
    assert code == 0
    assert (
        calls[-1]
        == "pip -m pip install --disable-pip-version-check --quiet --require-hashes -r needed.txt"
    )
    assert install(uv, pip="fails")[0] == 1


def test_uv_gets_the_index_of_pip(install):
    assert (
        "index https://mirror.example/simple"
        in install("works", PIP_INDEX_URL="https://mirror.example/simple")[2]
    )
    assert "index none" in install("works")[2]


def test_modules_are_compiled_at_once_where_they_cannot_be_later(install):
    assert "--compile-bytecode" in install("works", PYTHONDONTWRITEBYTECODE="1")[1][0]


def test_an_environment_whose_python_was_removed_is_made_anew(tmp_path):
    """As by an update of the system, which would leave a link to nothing."""
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/log\n')
    python.chmod(0o755)
    (tmp_path / "needed.txt").write_text("torch\n")
    script = (
        f". {ROOT}/tools/environment.sh; ROOT={tmp_path}; install() {{ :; }}; find() {{ echo {python}; }}; "
        "environment_from env needed.txt find size"
    )
    for link, called in ((python, 1), (python, 1), (tmp_path / "gone", 2)):
        (tmp_path / "env" / "bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / "env" / "bin" / "python").unlink(missing_ok=True)
        (tmp_path / "env" / "bin" / "python").symlink_to(link)
        subprocess.run(["bash", "-euc", script], check=True, capture_output=True)
        calls = [
            line
            for line in (tmp_path / "log").read_text().splitlines()
            if line.startswith("-m venv")
        ]
        assert len(calls) == called
    assert calls == [f"-m venv {tmp_path}/env", f"-m venv --clear {tmp_path}/env"]


def test_uv_is_named_with_hashes():
    lines = (ROOT / "tools" / "uv.txt").read_text().splitlines()
    assert sum("--hash=sha256:" in line for line in lines) == 2  # x86-64 and aarch64

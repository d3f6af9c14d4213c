# Sourced by run_pod.sh and run_tests.sh: makes .venv from requirements.txt where it is missing or out of
# date, and sets PYTHON to its interpreter. Needs Python 3.10 or newer and nothing else.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.10 python; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "no Python 3.10 or newer found; install one, or name it: PYTHON=/path/to/python3 $0" >&2
  exit 2
}

make_environment() {
  local venv="$ROOT/.venv" wanted
  wanted=$(cksum < "$ROOT/requirements.txt")
  if [ "$(cat "$venv/requirements.cksum" 2>/dev/null)" != "$wanted" ]; then
    local python
    python=$(find_python) || exit 2
    echo "making .venv with $("$python" --version) from requirements.txt (a few minutes, about 6 GB)" >&2
    "$python" -m venv "$venv" || { echo "$python cannot make a virtual environment; on Debian: apt install python3-venv" >&2; exit 1; }
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$ROOT/requirements.txt" || exit 1
    printf '%s\n' "$wanted" > "$venv/requirements.cksum"
  fi
  PYTHON="$venv/bin/python"
}

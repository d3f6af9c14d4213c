#!/usr/bin/env bash
# Proves the repository: lint, import directions, the fast tests (some twenty minutes on two cores).
#   ./run_tests.sh [--full] [pytest arguments]             --full adds the slow tests (under two hours)
#   ./run_tests.sh --ipu-environment [pytest arguments]    what the IPU path imports, on Python 3.8 and torch 2.0.1
set -eu
. "$(dirname "$0")/tools/environment.sh"
cd "$ROOT"

if [ "${1:-}" = --ipu-environment ]; then
  shift
  if ! find_python38 > /dev/null; then
    echo "skipped: no Python 3.8 on the PATH or under pyenv, so the IPU path is not tried on what its SDK pins"
    exit 0
  fi
  make_ipu_environment
  # The rooms that the IPU path imports; engines/ and parallel/ hold newer code besides.
  exec "$PYTHON" -m pytest -p tests.ipu_environment -m "not slow and not multiprocess and not gpu" "$@" \
    tests/ipu tests/recipe tests/models tests/optim tests/data tests/training tests/parallel/test_topology.py \
    tests/engines/test_ipu_model.py tests/engines/test_ipu_input.py tests/test_train.py tests/test_evaluate.py
fi

make_environment
selection=(-m "not slow")
if [ "${1:-}" = --full ]; then
  selection=()
  shift
fi
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check --quiet .
exec "$PYTHON" -m pytest "${selection[@]}" "$@"

#!/usr/bin/env bash
# Proves the repository: lint, import directions, the fast tests (under 10 minutes on two cores).
#   ./run_tests.sh [--full] [pytest arguments]     --full adds the slow tests (under an hour)
set -eu
. "$(dirname "$0")/tools/environment.sh"
make_environment
cd "$ROOT"
selection=(-m "not slow")
if [ "${1:-}" = --full ]; then
  selection=()
  shift
fi
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check --quiet .
exec "$PYTHON" -m pytest "${selection[@]}" "$@"

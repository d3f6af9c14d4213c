#!/usr/bin/env bash
# Checks the repository: lint, types, import rules, the fast tests (six to eight minutes on two cores).
#   ./run_tests.sh [--full] [pytest arguments]             --full adds the slow tests (half an hour more) and those of one IPU process
#   ./run_tests.sh --ipu-environment [pytest arguments]    what the IPU path imports, on Python 3.8 and torch 2.0.1
set -eu
. "$(dirname "$(readlink -f "$0")")/tools/environment.sh"  # wherever a link to this file lies
cd "$ROOT"

# The same files are imported by hundreds of processes; containers often forbid to keep them compiled.
unset PYTHONDONTWRITEBYTECODE

# Most tests run side by side, in one process more than there are cores, as many of them wait for processes of their own. Each more would
# collect all tests and load torch for its ranks once more, for 25 seconds of a core. Those that measure time run afterwards, alone.
ALONE="clock"

# run_selected MARKERS PYTEST_ARGUMENTS...: both turns, or one where ALONE is empty; fails if one of them does. A turn may have no
# tests, not both.
# Files begin in the order of tests/conftest.py where pytest-xdist allows that (3.7): by number of tests the longest would begin last.
run_selected() {
  local markers=$1 worst=0 empty=0 named=0 argument status
  shift
  local side_by_side=(-n "$((1 + $("$PYTHON" -c 'from common import cores; print(cores.available())')))" --dist loadfile)
  if "$PYTHON" -c 'import sys, xdist; sys.exit(tuple(map(int, xdist.__version__.split(".")[:2])) < (3, 7))'; then
    side_by_side+=(--no-loadscope-reorder)
  fi
  if [ -z "$ALONE" ]; then
    "$PYTHON" -m pytest "${side_by_side[@]}" -m "$markers" "$@"
    return
  fi
  "$PYTHON" -m pytest "${side_by_side[@]}" -m "($markers) and not $ALONE" "$@" || worst=$?
  [ "$worst" != 2 ] || return 2  # interrupted
  [ "$worst" != 5 ] || { worst=0; empty=1; }
  status=0
  # Unless tests are named, only files that have such tests: to collect all takes as long as they do.
  for argument in "$@"; do
    [ ! -e "${argument%%::*}" ] || named=1
  done
  [ $named = 1 ] || set -- "$@" $(grep -rl "mark\.$ALONE\b" tests)
  "$PYTHON" -m pytest -m "($markers) and $ALONE" "$@" || status=$?
  [ "$status" != 5 ] || status=$((empty * 5))
  return $((worst > status ? worst : status))
}

if [ "${1:-}" = --ipu-environment ]; then
  shift
  if ! find_python38 > /dev/null; then
    echo "skipped: no Python 3.8 on the PATH or under pyenv, so the IPU path is not tried on what its SDK pins"
    exit 0
  fi
  make_ipu_environment
  # The rooms that the IPU path imports; engines/ and parallel/ hold newer code besides.
  ALONE=""  # a test of these rooms that measures time would need a turn of its own: it runs in the other environment only
  run_selected "not slow and not multiprocess and not gpu and not clock" -p tests.ipu_environment "$@" \
    tests/ipu tests/common tests/recipe tests/models tests/optim tests/data tests/training tests/parallel/test_topology.py \
    tests/engines/test_ipu_model.py tests/engines/test_ipu_input.py tests/test_train.py tests/test_evaluate.py
  exit
fi

make_environment
selection="not slow and (multiprocess or not ipu)"
if [ "${1:-}" = --full ]; then
  selection="slow or not slow"
  shift
fi
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check --quiet .
# Types are checked beside the tests, in what these leave of the cores: the first ones start ranks that wait for each other.
nice -n 10 "$PYTHON" -m mypy &
checker=$!
status=0
run_selected "$selection" "$@" || status=$?
wait "$checker" || { echo "mypy: see the errors above" >&2; status=1; }
exit "$status"

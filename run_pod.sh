#!/usr/bin/env bash
# Trains a recipe with everything it needs: makes .venv if there is none, then runs train.py in it.
#   ./run_pod.sh --config configs/quickstart.yaml [section.key=value ...]
# Exit codes are train.py's: 0 done, 1 failed, 2 wrong input, 75 stopped by a signal after saving (rerun resumes).
set -u
. "$(dirname "$0")/tools/environment.sh"
make_environment
exec "$PYTHON" "$ROOT/train.py" "$@"

#!/usr/bin/env bash
# Trains a recipe with everything it needs: makes .venv if there is none, then starts the ranks in it.
#   ./run_pod.sh [--stages K] [--replicas R] --config configs/quickstart.yaml [section.key=value ...]
# Several hosts and SLURM: docs/cluster.md. With the Poplar SDK enabled (run.device: ipu) the SDK's Python is used.
# Exit codes are train.py's: 0 done, 1 failed, 2 wrong input, 75 stopped by a signal after saving (rerun resumes).
set -u
. "$(dirname "$(readlink -f "$0")")/tools/environment.sh"  # wherever a link to this file lies
if [ -n "${POPLAR_SDK_ENABLED:-}" ]; then
  PYTHON=${PYTHON:-python3}
  if ! "$PYTHON" -c 'import sys, importlib.util as i; sys.exit(not all(map(i.find_spec, ("pydantic", "yaml", "timm"))))'; then
    echo "$PYTHON lacks packages; in an environment of Python 3.8: pip install -r $ROOT/requirements-ipu.txt (docs/ipu.md)" >&2
    exit 2
  fi
else
  make_environment
fi
exec "$PYTHON" "$ROOT/tools/launch.py" "$@"

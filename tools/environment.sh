# Sourced by run_pod.sh and run_tests.sh: makes a virtual environment where it is missing or out of date, and
# sets PYTHON to its interpreter. make_environment: .venv from requirements.lock, which has a hash of every file that
# requirements.txt comes to; needs Python 3.10 or newer and nothing else. make_ipu_environment: .venv-ipu from
# requirements-ipu.txt, needs Python 3.8.

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

# Prints where Python 3.8 is; fails without a word where there is none. pyenv's own python3.8 only says which
# versions it has unless one is chosen, so what is found must run.
find_python38() {
  local candidate
  for candidate in "${PYTHON:-}" python3.8 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.8.*/bin/python; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 8))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

make_environment() {
  environment_from .venv requirements.lock find_python "about 6 GB" --require-hashes
}

make_ipu_environment() {
  environment_from .venv-ipu requirements-ipu.txt find_python38 "about 5 GB"
}

# environment_from FOLDER REQUIREMENTS FINDER SIZE [PIP OPTIONS]: FINDER prints the Python that makes it, and is asked only then.
environment_from() {
  local venv="$ROOT/$1" requirements="$ROOT/$2" wanted options=("${@:5}") clear=()
  wanted=$(cksum < "$requirements")
  # A link to a Python that was removed, as by an update of the system: venv itself would leave it as it is.
  if [ -L "$venv/bin/python" ] && ! [ -e "$venv/bin/python" ]; then clear=(--clear); fi
  if [ "$(cat "$venv/requirements.cksum" 2>/dev/null)" != "$wanted" ] || [ ${#clear[@]} -gt 0 ]; then
    local python
    python=$("$3") || exit 2
    echo "making $1 with $("$python" --version) from $2 (a minute or a few, $4)" >&2
    "$python" -m venv ${clear[@]+"${clear[@]}"} "$venv" || { echo "$python cannot make a virtual environment; on Debian: apt install python3-venv" >&2; exit 1; }
    install "$venv" "$requirements" ${options[@]+"${options[@]}"} || exit 1
    printf '%s\n' "$wanted" > "$venv/requirements.cksum"
  fi
  PYTHON="$venv/bin/python"
}

# install VENV REQUIREMENTS [OPTIONS]: by uv, which takes a third of pip's time, or by pip where uv cannot be had or fails (behind
# proxies that only pip is told of, say). Options are those that both have.
install() {
  local venv=$1 requirements=$2 pip quiet=(--quiet) compile=() index
  shift 2
  pip=("$venv/bin/python" -m pip install --disable-pip-version-check)
  # On a terminal one sees what takes so long.
  if [ -t 2 ]; then quiet=(); fi
  # pip compiles all modules, uv none. They are compiled as they are imported, unless that is forbidden: then each process would do it.
  if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then compile=(--compile-bytecode); fi
  # uv does not read pip's settings.
  index=${PIP_INDEX_URL:-$("$venv/bin/python" -m pip config get global.index-url 2>/dev/null || true)}
  if [ -n "$index" ]; then export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"; fi
  # Beside the packages, not among them: it is of no use to what runs there.
  if "${pip[@]}" --quiet --require-hashes --no-deps --target "$venv/uv" -r "$ROOT/tools/uv.txt" 2>/dev/null \
    && "$venv/uv/bin/uv" pip install ${quiet[@]+"${quiet[@]}"} ${compile[@]+"${compile[@]}"} --python "$venv/bin/python" "$@" -r "$requirements"; then
    rm -rf "$venv/uv"
    return
  fi
  rm -rf "$venv/uv"
  echo "uv did not install it; pip does (slower)" >&2
  "${pip[@]}" ${quiet[@]+"${quiet[@]}"} "$@" -r "$requirements"
}

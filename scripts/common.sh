# Sourced by the other scripts: a virtual environment in .venv with this project in it, made once and kept up to date.
# usage: use_environment EXTRAS

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '== %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

find_python() {
  local name
  for name in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
    if "$name" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  die "Python 3.11 or newer is needed: install it, or name it with PYTHON=/path/to/python3"
}

use_environment() {
  local extras=$1 python wanted stamp
  if [ ! -x .venv/bin/python ]; then
    python=$(find_python)
    say "making .venv with $("$python" --version)"
    "$python" -m venv .venv || die "no virtual environment could be made: on Debian and Ubuntu, apt install python3-venv"
  fi
  wanted=$(cat pyproject.toml constraints.txt | .venv/bin/python -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
  stamp=.venv/installed-$extras
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    say "installing into .venv (log: .venv/install.log)"
    if ! .venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[$extras]" >.venv/install.log 2>&1; then
      tail -n 5 .venv/install.log >&2
      die "the packages could not be installed: this step needs a package index (or a folder of wheels, see PIP_FIND_LINKS)"
    fi
    printf '%s\n' "$wanted" >"$stamp"
  fi
  PATH=$PWD/.venv/bin:$PATH
}

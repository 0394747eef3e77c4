# Sourced by the other scripts: activates .venv, making it and installing this project (with the extras named in $1)
# when it is missing or older than pyproject.toml. Set GENESIS_VENV to use another folder, PYTHON for another Python.
# shellcheck shell=bash
venv=${GENESIS_VENV:-.venv}
extras=${1:-}
stamp="$venv/.installed-${extras:-plain}"
if [ ! -f "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ constraints.txt -nt "$stamp" ]; then
  "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "Python 3.11 or newer is needed; set PYTHON to one" >&2; exit 1; }
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  echo "installing into $venv (a few minutes the first time)" >&2
  log=$(mktemp)
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint constraints.txt --editable ".${extras:+[$extras]}" >"$log" 2>&1 ||
    { cat "$log" >&2; exit 1; }
  rm -f "$log"
  touch "$stamp"
fi
PATH="$(cd "$venv" && pwd)/bin:$PATH"
export PATH

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
  # Shown: what takes a while. All of it where it fails.
  PYTHONUNBUFFERED=1 "$venv/bin/python" -m pip install --progress-bar off --disable-pip-version-check \
    --constraint constraints.txt --editable ".${extras:+[$extras]}" 2>&1 | tee "$log" |
    sed -n -u -E -e 's/^ *(Downloading|Using cached) ([^ ]*\/)?([^ /]+)( .*)?(\([0-9]{2,}\.[0-9]+ MB\)).*/  \1 \3 \5/p' \
      -e 's/^Building wheels?.*/  &/p' -e 's/^(Installing collected packages).*/  \1 (a minute or so)/p' >&2 ||
    { cat "$log" >&2; exit 1; }
  rm -f "$log"
  touch "$stamp"
fi
PATH="$(cd "$venv" && pwd)/bin:$PATH"
export PATH

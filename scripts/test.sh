#!/usr/bin/env bash
# The tests, on a machine with nothing but Python 3.11+: makes .venv, installs with the dev extras, runs pytest.
# Further arguments go to pytest, e.g. scripts/test.sh -m slow, or scripts/test.sh tests/genesis/store.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh dev
# Hundreds of the tests start processes; with nothing compiled each of them would take a third longer to begin.
unset PYTHONDONTWRITEBYTECODE
# More processes than cores: many of the tests wait for processes and servers of their own.
exec python -m pytest -n 4 "$@"

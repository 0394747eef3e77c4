#!/usr/bin/env bash
# Format, lint, types, import rules. With --fix, mends format and lint first.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh dev
if [ "${1:-}" = --fix ]; then
  ruff format .
  ruff check --fix .
fi
ruff format --check .
ruff check .
mypy
lint-imports
for script in scripts/*.sh .ci/run; do bash -n "$script"; done

#!/usr/bin/env bash
# From nothing to token shards: makes .venv, installs, populates ./genesis-demo from the text of the running Python's
# own standard library (no account, no network but the package index), and shows what is in it.
# GENESIS_STORE names another folder; further arguments go to 'genesis populate'.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
store=${GENESIS_STORE:-genesis-demo}
echo "== genesis populate --source python-docs --store $store --shard-tokens 250000"
genesis populate --source python-docs --store "$store" --shard-tokens 250000 "$@"
echo
echo "== genesis status --store $store"
genesis status --store "$store"
echo
echo "== genesis inspect shard 0 --store $store"
genesis inspect shard 0 --store "$store" --documents 1 | head -n 24

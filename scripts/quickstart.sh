#!/usr/bin/env bash
# From nothing to training: makes .venv, installs, populates ./genesis-demo from the text of the running Python's own
# standard library (no account, no network but the package index), shows what is in it, and trains on it for some steps.
# GENESIS_STORE names another folder; further arguments go to 'genesis populate'.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh train
store=${GENESIS_STORE:-genesis-demo}
export GENESIS_CACHE_DIR=${GENESIS_CACHE_DIR:-genesis-demo-cache}
echo "== genesis populate --source python-docs --store $store --shard-tokens 250000"
genesis populate --source python-docs --store "$store" --shard-tokens 250000 "$@"
echo
echo "== genesis status --store $store"
genesis status --store "$store"
echo
echo "== genesis inspect shard 0 --store $store"
genesis inspect shard 0 --store "$store" --documents 1 | head -n 24
echo
echo "== python -m loader plan --node-id demo --store $store --count 3"
python -m loader plan --node-id demo --store "$store" --count 3
echo
echo "== the first batch of GenesisDataset(\"$store\", \"demo\")"
python - "$store" <<'EOF'
import sys

from loader import GenesisDataset

dataset = GenesisDataset(sys.argv[1], "demo", seq_len=256, batch_size=4)
batch = next(iter(dataset))
print({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in batch.items()})
EOF
echo
folder=${GENESIS_TRAINING:-genesis-demo-training}
echo "== python -m trainer --node-id demo --store $store --preset tiny --seq-len 128 --batch-size 4 --max-steps 20"
python -m trainer --node-id demo --store "$store" --preset tiny --seq-len 128 --batch-size 4 --max-steps 20 --lr 1e-3 \
  --set inner.warmup_steps=10 --no-api --checkpoint-dir "$folder/checkpoints" --set state_dir="$folder"

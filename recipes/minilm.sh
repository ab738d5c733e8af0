#!/usr/bin/env bash
# From text to the released inverter of all-MiniLM-L6-v2, on one GPU:
#   recipes/minilm.sh TEXT... (files of passages, one a line: .txt, .txt.gz, .txt.xz, .jsonl, .parquet)
# MINUTES of training (13.8 made the first release on an H200); HELDOUT is a folder of .txt to measure on.
set -euo pipefail
minutes=${MINUTES:-13.8}
unembed prepare "$@" --encoder all-MiniLM-L6-v2 --passages -o runs/minilm-data
unembed train --preset small --data runs/minilm-data -o runs/minilm --minutes "$minutes"
python recipes/release.py runs/minilm/model runs/minilm/release --sources recipes/minilm-sources.txt
if [ -n "${HELDOUT:-}" ]; then
  for file in "$HELDOUT"/*.txt; do
    unembed evaluate "$file" --model runs/minilm/release --strategy confidence,sequential --steps 8,32 --json \
      > "runs/minilm/$(basename "$file" .txt).json"
  done
fi

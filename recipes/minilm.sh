#!/usr/bin/env bash
# From text to the released inverter of all-MiniLM-L6-v2, on one GPU:
#   recipes/minilm.sh TEXT... (files of passages, one a line: .txt, .txt.gz, .txt.xz, .jsonl, .parquet)
# MINUTES of training; START, weights to go on from (a folder, or `all-MiniLM-L6-v2` for the bundled ones): a
# long training may be cut into stretches. HELDOUT is a folder of .txt to measure on.
# The bundled weights are sixteen stretches on an H200, of 13.8, 13.0, 5.4, 14.0, 7.5, 16.5, 5.2, 20.9, 18.2, 20.2, 20.4, 24.5, 14.2, 8.7,
# 7.0 and 13.2 minutes, in the fifteenth with practice (practice_share=0.25). Three means were made on the way (average.py): of the tenth,
# eleventh and thirteenth by .25, .3 and .45, from which the fourteenth began; of that, the fourteenth and the fifteenth by .34, .33 and .33,
# from which the sixteenth began; and at last of that and the sixteenth by .4 and .6.
# docs/log.md has the settings of each, benchmarks/results/stretches-h200.json the figures.
set -euo pipefail
minutes=${MINUTES:-60}
unembed prepare "$@" --encoder all-MiniLM-L6-v2 --passages -o runs/minilm-data
unembed train --preset small --data runs/minilm-data -o runs/minilm --minutes "$minutes" \
  ${START:+--start-from "$START" --warmup 200}
python recipes/release.py runs/minilm/model runs/minilm/release --sources recipes/minilm-sources.txt
if [ -n "${HELDOUT:-}" ]; then
  unembed evaluate "$HELDOUT"/*.txt --model runs/minilm/release --strategy beam,confidence,sequential --steps 8,32 \
    -o runs/minilm/records.jsonl
  unembed report runs/minilm/records.jsonl -o runs/minilm/report
fi

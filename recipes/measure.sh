#!/usr/bin/env bash
# Measure the bundled model on held-out text: recipes/measure.sh FOLDER_OF_TXT [OUT]
# Records of every text, by a beam and in 8 passes, with 95 % intervals and two baselines, and a page. Runs on a laptop, some
# minutes a set; stopped, it goes on.
set -euo pipefail
texts=$1
out=${2:-runs/measured}
mkdir -p "$out"
unembed evaluate "$texts"/*.txt --strategy beam,confidence --steps 8 --baseline random,unconditional \
  -o "$out/records.jsonl"
unembed report "$out/records.jsonl" -o "$out/report"

#!/usr/bin/env bash
# Measure the bundled model on held-out text: recipes/measure.sh FOLDER_OF_TXT [OUT]
# One JSON file a set, 8 and 32 passes, with 95 % intervals. Runs on a laptop, a few minutes a set.
set -euo pipefail
texts=$1
out=${2:-benchmarks/results/dev}
mkdir -p "$out"
for file in "$texts"/*.txt; do
  unembed evaluate "$file" --strategy confidence,sequential --steps 8,32 --json > "$out/$(basename "$file" .txt).json"
done

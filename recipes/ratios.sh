#!/usr/bin/env bash
# Fixed mask ratios against dynamic schedules, at equal minutes (the paper's appendix), on one GPU:
#   recipes/ratios.sh PREPARED_PASSAGES FOLDER_OF_TXT OUT_FOLDER [--tiny]
# MINUTES each (1 if not said). A variant whose line is there is not trained again, so it may be cut anywhere.
set -euo pipefail
data=$1 texts=$2 out=$3
more=("${@:4}")
mkdir -p "$out"
variant() {
  name=$1
  shift
  [ -s "$out/$name.json" ] && return
  python recipes/compare.py "$name" --data "$data" --texts "$texts" --minutes "${MINUTES:-1}" "${more[@]}" \
    causal=False causal_share=0.0 lowest_t=0.0 warmup=100 "$@" > "$out/$name.part"
  mv "$out/$name.part" "$out/$name.json"
}
for share in 0.1 0.2 0.4 0.8 1.0; do
  variant "fixed-$share" schedule=fixed mask_ratio=$share
done
variant linear
variant cosine schedule=cosine
variant exponential schedule=exponential
variant paper schedule=exponential weight=inverse-t stratified=False time_conditioning=True

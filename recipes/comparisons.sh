#!/usr/bin/env bash
# The preset `small` against itself with one thing changed, at equal minutes, on one GPU:
#   recipes/comparisons.sh PREPARED_PASSAGES FOLDER_OF_TXT OUT_FOLDER [--tiny]
# MINUTES each (1 if not said). A variant whose line is there is not trained again, so it may be cut anywhere.
set -euo pipefail
data=$1 texts=$2 out=$3
more=("${@:4}")
mkdir -p "$out"
train() {
  recipe=$1 name=$2
  shift 2
  [ -s "$out/$name.json" ] && return
  python "recipes/$recipe.py" "$name" --data "$data" --texts "$texts" --minutes "${MINUTES:-1}" "${more[@]}" \
    warmup=100 "$@" > "$out/$name.part"
  mv "$out/$name.part" "$out/$name.json"
}
train compare base
train compare paper-schedule schedule=exponential weight=inverse-t stratified=False lowest_t=0.0
train compare elbo weight=elbo
train compare learned-positions positions=learned
train compare full-adaln adaln_rank=0
train variants prefix
train compare time-conditioning time_conditioning=True
train compare no-condition-dropout condition_dropout=0.0
train variants self-conditioning
train variants drafts
train variants cached
train compare no-splices splice_share=0.0
train compare no-hidden-tokens causal_hidden=0.0
train compare no-dropout dropout=0.0
train compare adamw optimizer=adamw
train compare suffix suffix_share=0.3
train compare 12x512 layers=12 hidden=512 heads=8 ffn=2048

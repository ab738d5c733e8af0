#!/usr/bin/env bash
# Depth, and what to freeze, at equal minutes, on one GPU:
#   ENCODER=FOLDER recipes/depth.sh PREPARED_PASSAGES FOLDER_OF_TXT OUT_FOLDER [--tiny]
# First the preset `small` with other numbers of layers. Then an inverter for another ENCODER of the same
# vocabulary (such as the static one that encoders.sh makes): from nothing, and from the weights of the bundled
# inverter, of which all, all but the vocabulary, or only what reads the vector learns. Without ENCODER only the first.
# START is another model to start from; a rehearsal (--tiny) needs one of its own sizes, as stretch.py --tiny makes.
# MINUTES each (1 if not said). A variant whose line is there is not trained again, so it may be cut anywhere.
set -euo pipefail
data=$1 texts=$2 out=$3
more=("${@:4}")
mkdir -p "$out"
train() {
  name=$1
  shift
  [ -s "$out/$name.json" ] && return
  # In a few minutes nothing is learnt by heart, so what the preset does against that is left out.
  python recipes/compare.py "$name" --data "$data" --texts "$texts" --minutes "${MINUTES:-1}" "${more[@]}" \
    dropout=0.0 causal_hidden=0.0 splice_share=0.0 warmup=100 "$@" > "$out/$name.part"
  mv "$out/$name.part" "$out/$name.json"
}
for layers in 2 4 8 16; do
  train "layers-$layers" layers=$layers
done
[ -n "${ENCODER:-}" ] || { echo "no ENCODER given: depth alone is compared" >&2; exit; }
start=${START:-all-MiniLM-L6-v2}
train scratch --encoder "$ENCODER"
train all --encoder "$ENCODER" --start-from "$start"
train embeddings --encoder "$ENCODER" --start-from "$start" freeze=embeddings
train backbone --encoder "$ENCODER" --start-from "$start" freeze=backbone

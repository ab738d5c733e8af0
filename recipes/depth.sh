#!/usr/bin/env bash
# Depth, and what to freeze, at equal minutes, on one GPU:
#   ENCODER=FOLDER MINUTES=1 JOBS=4 recipes/depth.sh PREPARED_PASSAGES FOLDER_OF_TXT OUT_FOLDER [--tiny]
# First the preset `small` with other numbers of layers. Then an inverter for another ENCODER of the same
# vocabulary (such as the static one that encoders.sh makes): from nothing, and from the weights of the bundled
# inverter, of which all, all but the vocabulary, or only what reads the vector learns. Without ENCODER only the first.
# START is another model to start from; a rehearsal (--tiny) needs one of its own sizes, as stretch.py --tiny makes.
set -uo pipefail
. "$(dirname "$0")/turns.sh"
# In a few minutes nothing is learnt by heart, so text is taken as it is: neither spliced nor swapped; nor is there time
# to learn to guess vectors.
short=(splice_share=0.0 swap_share=0.0 rare_share=0.0 reword_share=0.0 embeds=False embed_share=0.0)
for layers in 2 4 8 16; do
  variant compare "layers-$layers" "${short[@]}" layers=$layers
done
if [ -n "${ENCODER:-}" ]; then
  start=(--encoder "$ENCODER" --start-from "${START:-all-MiniLM-L6-v2}")
  variant compare scratch "${short[@]}" --encoder "$ENCODER"
  variant compare all "${short[@]}" "${start[@]}"
  variant compare embeddings "${short[@]}" "${start[@]}" freeze=embeddings
  variant compare backbone "${short[@]}" "${start[@]}" freeze=backbone
else
  echo "no ENCODER given: depth alone is compared" >&2
fi
finish

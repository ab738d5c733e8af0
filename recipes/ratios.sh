#!/usr/bin/env bash
# Fixed mask ratios against dynamic schedules, at equal minutes (the paper's appendix), on one GPU:
#   MINUTES=1 JOBS=4 recipes/ratios.sh PREPARED_PASSAGES FOLDER_OF_TXT OUT_FOLDER [--tiny]
set -uo pipefail
. "$(dirname "$0")/turns.sh"
masked=(causal=False causal_share=0.0 causal_hidden=0.0 lowest_t=0.0)
for share in 0.1 0.2 0.4 0.8 1.0; do
  variant compare "fixed-$share" "${masked[@]}" schedule=fixed mask_ratio=$share
done
variant compare linear "${masked[@]}"
variant compare cosine "${masked[@]}" schedule=cosine
variant compare exponential "${masked[@]}" schedule=exponential
variant compare paper "${masked[@]}" schedule=exponential weight=inverse-t stratified=False time_conditioning=True
finish

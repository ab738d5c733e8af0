#!/usr/bin/env bash
# Fixed mask ratios against dynamic schedules, at equal minutes (the paper's appendix), on one GPU:
#   MINUTES=1 JOBS=4 recipes/ratios.sh PREPARED_PASSAGES FOLDER_OF_TXT OUT_FOLDER [--tiny]
set -uo pipefail
. "$(dirname "$0")/turns.sh"
# Masks alone, and text as it is, neither spliced nor swapped: in a few minutes nothing is learnt by heart.
masked=(causal=False causal_share=0.0 lowest_t=0.0 splice_share=0.0 swap_share=0.0 rare_share=0.0 reword_share=0.0 embeds=False embed_share=0.0)
# A smaller network than the preset's: in so short a time it learns more.
if [[ " ${more[*]} " != *" --tiny "* ]]; then
  masked+=(layers=4 hidden=384 heads=6 ffn=1536 adaln_rank=0 adaln_diagonal=False)
fi
for share in 0.1 0.2 0.4 0.8 1.0; do
  variant compare "fixed-$share" "${masked[@]}" schedule=fixed mask_ratio=$share
done
variant compare linear "${masked[@]}"
variant compare cosine "${masked[@]}" schedule=cosine
variant compare exponential "${masked[@]}" schedule=exponential
variant compare paper "${masked[@]}" schedule=exponential weight=inverse-t stratified=False time_conditioning=True
finish

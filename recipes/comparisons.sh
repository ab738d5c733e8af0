#!/usr/bin/env bash
# The preset `small` against itself with one thing changed, at equal minutes, on one GPU:
#   MINUTES=1 JOBS=4 recipes/comparisons.sh PREPARED_PASSAGES FOLDER_OF_TXT OUT_FOLDER [--tiny]
set -uo pipefail
. "$(dirname "$0")/turns.sh"
variant compare base
variant compare paper-schedule schedule=exponential weight=inverse-t stratified=False lowest_t=0.0
variant compare elbo weight=elbo
variant compare learned-positions positions=learned
variant compare full-adaln adaln_rank=0
variant variants prefix
variant compare time-conditioning time_conditioning=True
variant compare no-condition-dropout condition_dropout=0.0
variant variants self-conditioning
variant variants drafts
variant variants cached
variant compare no-splices splice_share=0.0
variant compare no-swaps swap_share=0.0
variant compare no-rare-words rare_share=0.0
variant compare no-rewording reword_share=0.0
variant compare no-guesses embeds=False embed_share=0.0
variant compare hidden-tokens causal_hidden=0.1
variant compare dropout dropout=0.1
variant compare adamw optimizer=adamw
variant compare suffix suffix_share=0.3
variant compare 12x512 layers=12 hidden=512 heads=8 ffn=2048
finish

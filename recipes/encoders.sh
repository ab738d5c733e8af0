#!/usr/bin/env bash
# Three encoders of different kinds, an inverter for each, equal minutes, one table:
#   recipes/encoders.sh DATA TEXTS OUT
# DATA: passages prepared for all-MiniLM-L6-v2; TEXTS: a folder of held-out .txt; MINUTES of training each.
# MORE: further encoders, by name, folder or hub id, each with a vocabulary of its own; CORPUS: the files of text
# that DATA was made of, which are prepared for each of them. TRUST=1 runs code that these encoders bring.
# FIELDS: settings of all runs, such as batch_size=256 for a smaller GPU.
# The encoders are made where they are missing (OUT/static, OUT/lsa; no GPU needed); what is prepared, trained or
# half trained in OUT is kept, so the script may be stopped and started again.
set -euo pipefail
data=$1
texts=$2
out=$3
minutes=${MINUTES:-5}
here=$(cd "$(dirname "$0")" && pwd)
# Lists of words, and of files by their patterns.
# shellcheck disable=SC2206
more=(${MORE:-}) fields=(${FIELDS:-})
trust=()
[ -z "${TRUST:-}" ] || trust=(--trust-remote-code)
if [ ${#more[@]} -gt 0 ]; then
  : "${CORPUS:?files of text, to be prepared for the encoders of MORE}"
  # Folders in OUT are called by the last part of a name. Case is left aside: a name and its hub id are one encoder.
  twice=$(basename -a all-MiniLM-L6-v2 static lsa "${more[@]}" | sort -f | uniq -di)
  if [ -n "$twice" ]; then
    echo "two encoders are called $twice; leave one out, or link its folder under another name." >&2
    exit 1
  fi
fi
mkdir -p "$out"
runs=()
train() { # ENCODER DATA [FLAG]: train and measure, in as many pieces as it takes
  local run
  run=$out/run-$(basename "$1")
  runs+=("$run")
  until [ -f "$run/figures.json" ]; do
    # In a few minutes nothing is learnt by heart, so text is taken as it is, neither spliced nor swapped; and there is
    # no time to learn to guess vectors.
    python "$here/encoders.py" train "$1" --data "$2" --texts "$texts" --out "$run" --minutes "$minutes" "${@:3}" \
      --set splice_share=0.0 swap_share=0.0 rare_share=0.0 reword_share=0.0 embeds=False embed_share=0.0 "${fields[@]}"
  done
}
[ -d "$out/static" ] || "$here/static.sh" "$data" "$out/static"
[ -d "$out/lsa" ] || python "$here/encoders.py" lsa --data "$data" --out "$out/lsa"
for encoder in all-MiniLM-L6-v2 "$out/static" "$out/lsa"; do
  train "$encoder" "$data"
done
for encoder in "${more[@]}"; do
  # Asked for at each start: a folder that is complete is left as it is, one of another encoder refused.
  # shellcheck disable=SC2086
  python "$here/encoders.py" prepare "$encoder" $CORPUS --data "$data" --out "$out/data-$(basename "$encoder")" "${trust[@]}"
  train "$encoder" "$out/data-$(basename "$encoder")" "${trust[@]}"
done
python "$here/encoders.py" table "${runs[@]}" --out "$out/encoders.json"

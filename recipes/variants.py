"""Compare variants that are more than a field of the settings, at equal GPU minutes.

    python recipes/variants.py NAME --data DIR --texts DIR --minutes 1.3 [field=value ...]

high-masks         t from 0.3 up, so that more tokens carry loss
self-conditioning  half of the rows see what the model predicts for them without seeing it
drafts             some visible tokens are wrong or one place off; the loss asks for the right ones there
cached             the same spans every epoch, the first 32 tokens of each passage
prefix             eight tokens made from the vector instead of AdaLN

Prints one line of JSON, as compare.py does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from compare import (
    Invert,
    alone,
    arguments,
    measure_sets,
    plain_modes,
    print_line,
    settings,
    train_on_time,
    turn,
    warm_up,
)
from torch import Tensor, nn

from unembed.backbone import build
from unembed.config import Config, ModelConfig
from unembed.decode import fill_after_end
from unembed.diffusion import chosen_places, token_weights
from unembed.encoders import load_encoder
from unembed.inverter import Inverter, content_lengths
from unembed.model import Denoiser, adaln
from unembed.pairs import Batch, FreshSpans, Pairs, step_generator
from unembed.run import Run
from unembed.strategies import Moment, Proposal, find_strategy
from unembed.train import masked_loss, open_pairs, train_step, validate

Loss = Callable[..., Tensor]
WRONG = 0.1  # share of a text's visible tokens that `drafts` replaces
SHIFTED = 0.25  # share of rows in which `drafts` moves a run of tokens by one place
LONGEST_RUN = 16
LIKELY = 64  # wrong tokens are drawn from so many that the vector suggests
PREFIX = 8


def run_blocks(model: Denoiser, x: Tensor, c: Tensor, t: Tensor | None) -> Tensor:
    """Run the blocks and the last norm on inputs (B, T, D) that are not just tokens."""
    turns = None if model.turns is None else model.turns[:, : x.shape[1]]
    x = x.to(c.dtype)
    for block in model.blocks:
        x = block(x, c, t, turns)
    return adaln(x, *model.modulation(c, t))


class SelfConditioned(Denoiser):
    """A denoiser that may be told what it predicted before."""

    condition = None  # decoding shall not work anything out beforehand

    def __init__(self, config: ModelConfig) -> None:
        """Add the map from predictions to inputs, zero at first."""
        super().__init__(config)
        self.told = nn.Linear(config.hidden, config.hidden, bias=False)
        nn.init.zeros_(self.told.weight)

    def hidden(
        self,
        xt: Tensor,
        e: Tensor,
        *,
        t: Tensor | None = None,
        drop: Tensor | None = None,
        previous: Tensor | None = None,
    ) -> Tensor:
        """Run the trunk; `previous` (B, T, D) are expected token embeddings, zero where there are none."""
        x = self.tokens(xt) + self.places[: xt.shape[1]]
        if previous is not None:
            x = x + self.told(previous)
        return run_blocks(self, x, self.projection(e, drop), t)

    def expected(self, h: Tensor) -> Tensor:
        """Mean embedding (N, D) of the tokens predicted from hidden states (N, D)."""
        return self.head(h).float().softmax(-1).to(h.dtype) @ self.tokens.weight.to(h.dtype)


def self_conditioned_loss(
    model: Any, x0: Tensor, e: Tensor, t: Tensor, masked: Tensor, drop: Tensor, *, config: Config, count: int
) -> Tensor:
    """The usual loss; every other row is told what the model says of it without being told."""
    xt = x0.masked_fill(masked, config.model.mask_id)
    told = masked[::2]
    h = model.hidden(xt[::2], e[::2], t=t[::2], drop=drop[::2])
    # Half of the bound and a little: a place too many goes untold. Detached, not in `no_grad`, whose
    # half-precision copies of the weights autocast would hand to the second pass.
    places = chosen_places(told, min(told.numel(), count // 2 + 4 * x0.shape[1]))
    means = model.expected(h.flatten(0, 1)[places]).detach() * told.flatten()[places, None]
    half = means.new_zeros(told.numel(), means.shape[1]).index_copy(0, places, means).view(*told.shape, -1)
    previous = torch.stack((half, torch.zeros_like(half)), 1).flatten(0, 1)[: len(x0)]
    h = model.hidden(xt, e, t=t, drop=drop, previous=previous)
    return loss_at(model, h, x0, e, t, masked, config=config, count=count)


def loss_at(
    model: Any,
    h: Tensor,
    x0: Tensor,
    e: Tensor,
    t: Tensor,
    asked: Tensor,
    *,
    config: Config,
    count: int,
) -> Tensor:
    """`masked_loss` of hidden states, at the places that are asked about."""
    places = chosen_places(asked, count)
    logits = model.head(h.flatten(0, 1)[places]).float()
    entropy = F.cross_entropy(logits, x0.flatten()[places], reduction="none")
    loss = (entropy * token_weights(asked, t, config.diffusion).flatten()[places]).sum()
    if config.train.bag_weight:
        log_p = F.log_softmax(model.bag(e).float(), dim=-1).gather(1, x0)
        loss = loss - config.train.bag_weight * (log_p * (x0 != config.model.pad_id)).sum()
    return loss


@torch.inference_mode()
def decode_told(model: Any, e: Tensor, *, strategy: str, steps: int, config: Config) -> Tensor:
    """Decode, each pass being told what the one before predicted for the places still masked."""
    chosen = find_strategy(strategy)
    m = config.model
    ids = torch.full((len(e), m.max_tokens), m.mask_id, device=e.device)
    previous = torch.zeros((*ids.shape, m.hidden), device=e.device)
    for step in range(steps):
        masked = ids == m.mask_id
        moment = Moment(step, steps, torch.zeros_like(ids).float(), m.pad_id, config.diffusion)
        t = chosen.time(masked.float().mean(1), config.diffusion)
        h = model.hidden(ids, e, t=t, previous=previous * masked[..., None])
        sure, tokens = model.head(h).float().softmax(-1).max(-1)
        previous = model.expected(h.flatten(0, 1)).view_as(h).float()
        kept = chosen.commit(Proposal(chosen.select(masked, moment), tokens, sure), moment)
        ids = fill_after_end(torch.where(kept, tokens, ids), m)
    return ids


def told_modes(run: Run) -> dict[str, Invert]:
    """The usual ways to decode, with self-conditioning."""

    def by(strategy: str, steps: int) -> Invert:
        def invert(vectors: np.ndarray) -> list[list[int]]:
            found: list[list[int]] = []
            for part in torch.from_numpy(vectors).to(run.group.device).split(256):
                with run.half():
                    rows = decode_told(run.average, part, strategy=strategy, steps=steps, config=run.config)
                lengths = content_lengths(rows.cpu().numpy(), end_id=run.config.model.end_id)
                found += [row[:length] for row, length in zip(rows.tolist(), lengths, strict=True)]
            return found

        return invert

    return {"c8": by("confidence", 8), "c32": by("confidence", 32), "s32": by("sequential", 32)}


def drafts_loss(
    model: Any, x0: Tensor, e: Tensor, t: Tensor, masked: Tensor, drop: Tensor, *, config: Config, count: int
) -> Tensor:
    """The usual loss on rows whose visible tokens are partly wrong, and the same of those tokens."""
    draft = spoil(x0, model.bag(e).detach(), pad_id=config.model.pad_id)
    wrong = (draft != x0) & ~masked
    h = model.hidden(draft.masked_fill(masked, config.model.mask_id), e, t=t, drop=drop)
    # About a sixth of the visible half is wrong at most; a place too many goes without loss.
    count = min(x0.numel(), count + x0.numel() // 8)
    return loss_at(model, h, x0, e, t, masked | wrong, config=config, count=count)


def spoil(x0: Tensor, bag: Tensor, *, pad_id: int) -> Tensor:
    """Make errors such as the model makes: words that the vector suggests, and runs one place off."""
    B, T = x0.shape
    device = x0.device
    places = torch.arange(T, device=device)
    begin, run, side, which = torch.rand((4, B, 1), device=device)
    first = (begin * T).long()
    moved = (which < SHIFTED) & (places >= first) & (places < first + 1 + (run * LONGEST_RUN).long())
    source = (places + torch.where(side < 0.5, -1, 1)).clamp(0, T - 1)
    draft = torch.where(moved, x0.gather(1, source), x0)
    # Drawn by Gumbel's trick, so that no cumulative sum over the vocabulary is needed.
    scores, likely = bag.float().topk(LIKELY, dim=-1)
    noise = -torch.log(-torch.log(torch.rand((B, T, LIKELY), device=device).clamp(1e-6, 1 - 1e-6)))
    words = likely.gather(1, (scores[:, None] + noise).argmax(-1))
    replaced = (torch.rand((B, T), device=device) < WRONG) & (x0 != pad_id)
    return torch.where(replaced, words, draft)


class FixedSpans:
    """The first tokens of every passage, in a new order each epoch: what cached pairs would hold."""

    def __init__(self, fresh: Pairs, *, batch_size: int, seed: int) -> None:
        """Take the corpus and the encoder from spans that are cut anew."""
        assert isinstance(fresh, FreshSpans)
        self.fresh, self.batch_size, self.seed = fresh, batch_size, seed
        self._epoch, self._order = -1, torch.empty(0)

    def batch(self, step: int, rows: slice) -> Batch:
        """Rows of the batch of that step; what is left of an epoch when no batch fits goes unseen."""
        fresh = self.fresh
        epoch, within = divmod(step, fresh.train_count // self.batch_size)
        if epoch != self._epoch:
            generator = step_generator(self.seed, epoch, stream=1, device=fresh.device)
            self._order = torch.randperm(fresh.train_count, generator=generator, device=fresh.device)
            self._epoch = epoch
        chosen = self._order[within * self.batch_size : (within + 1) * self.batch_size][rows]
        begin = fresh.offsets[chosen]
        lengths = (fresh.offsets[chosen + 1] - begin).clamp_max(fresh.max_tokens)
        ids = fresh._cut(begin, lengths, kept=lengths, then=begin)
        if fresh._compiled is None:
            return ids, fresh.encoder.encode_ids(ids, lengths)
        with torch.no_grad():
            return ids, fresh._compiled(ids, lengths)

    def validation(self) -> Batch:
        """The passages kept aside."""
        return self.fresh.validation()

    def most_tokens(self, rows: int) -> int:
        """Bound the tokens of so many rows: passages are all sorts."""
        return rows * self.fresh.max_tokens


class Settled(nn.Module):
    """Scales, shifts and gates that are learned, but the same for every vector."""

    def __init__(self, hidden: int, chunks: int) -> None:
        """All zero at first, as AdaLN."""
        super().__init__()
        self.values = nn.Parameter(torch.zeros(chunks, hidden))

    def forward(self, c: Tensor, t: Tensor | None) -> tuple[Tensor, ...]:
        """Return `chunks` tensors of shape (1, 1, D)."""
        return self.values.to(c.dtype)[:, None, None].unbind(0)


class Prefixed(Denoiser):
    """A denoiser that reads the vector as tokens in front of the text."""

    condition = None

    def __init__(self, config: ModelConfig) -> None:
        """Build the trunk for the longer rows, its norms blind to the vector."""
        super().__init__(replace(config, max_tokens=config.max_tokens + PREFIX))
        self.config = config  # what decoding asks about is the text
        self.prefix = nn.Linear(config.hidden, PREFIX * config.hidden)
        nn.init.normal_(self.prefix.weight, std=0.02)
        self.modulation = Settled(config.hidden, 2)  # type: ignore[assignment]
        for block in self.blocks:
            block.modulation = Settled(config.hidden, 6)

    def hidden(self, xt: Tensor, e: Tensor, *, t: Tensor | None = None, drop: Tensor | None = None) -> Tensor:
        """Run the trunk on the prefix and the text; return the text's states."""
        c = self.projection(e, drop)
        prefix = self.prefix(c).view(len(xt), PREFIX, -1)
        x = torch.cat((prefix, self.tokens(xt).to(prefix.dtype)), 1) + self.places[: PREFIX + xt.shape[1]]
        return run_blocks(self, x, c, t)[:, PREFIX:]


@dataclass(frozen=True)
class Variant:
    """What differs from the preset."""

    fields: dict[str, Any] = field(default_factory=dict)
    network: Callable[[ModelConfig], nn.Module] = build
    loss: Loss = masked_loss
    fixed_spans: bool = False
    told: bool = False


VARIANTS = {
    "high-masks": Variant({"lowest_t": 0.3}),
    "self-conditioning": Variant(network=SelfConditioned, loss=self_conditioned_loss, told=True),
    "drafts": Variant(loss=drafts_loss),
    "cached": Variant(fixed_spans=True),
    "prefix": Variant(network=Prefixed),
}


def main() -> None:
    """Train one variant for the given minutes and print its figures."""
    parser = arguments(__doc__ or "")
    args = parser.parse_intermixed_args()
    if args.name not in VARIANTS:
        parser.error(f"there is no variant {args.name!r}; choose from {', '.join(VARIANTS)}.")
    variant = VARIANTS[args.name]
    config, data, fields = settings(args)
    fields = {**variant.fields, **fields}
    config = config.override(**{k: v for k, v in variant.fields.items() if fields[k] == v})
    run = Run(config, group=alone(), network=variant.network)
    pairs = open_pairs(config, data, run.group)
    if variant.fixed_spans:
        pairs = FixedSpans(pairs, batch_size=config.train.batch_size, seed=config.train.seed)
    loss_function = torch.compile(variant.loss) if config.train.compile else variant.loss

    def step() -> Tensor:
        return train_step(run, pairs, loss_function)

    warm_up(run, step)
    with turn(args.lock):
        train_on_time(run, step)
        figures = validate(run, pairs.validation())
        encoder = load_encoder(config.encoder, device=str(run.group.device))
        inverter = Inverter(run.average, config=config, tokenizer=data.tokenizer)
        modes = told_modes(run) if variant.told else plain_modes(inverter)
        sets = measure_sets(args.texts, modes, limit=args.limit, data=data, encoder=encoder)
    print_line(args, fields, run, figures=figures, sets=sets)


if __name__ == "__main__":
    main()

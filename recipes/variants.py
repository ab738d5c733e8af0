"""Compare variants that are more than a field of the settings, at equal GPU minutes.

    python recipes/variants.py NAME --data DIR --texts DIR --minutes 1.3 [field=value ...]

self-conditioning  half of the masked rows see what the model predicts for them without seeing it
drafts             some visible tokens of masked rows are wrong or one place off; the right ones are asked for
cached             the same spans every epoch, the first 32 tokens of each passage; none spliced or swapped
prefix             eight tokens made from the vector instead of AdaLN

All keep the rows that are read left to right. Prints one line of JSON, as compare.py does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from compare import Invert, Modes, arguments, plain_modes, train_and_measure
from torch import Tensor, nn

from unembed.config import Config, ModelConfig
from unembed.corpus import PreparedData
from unembed.decode import fill_after_end
from unembed.diffusion import chosen_places
from unembed.inverter import Inverter
from unembed.model import Denoiser, Modulation, adaln
from unembed.pairs import FreshSpans, Pairs, step_generator
from unembed.readable import content_lengths
from unembed.run import Group, Run
from unembed.step import masked_loss
from unembed.strategies import Moment, Proposal, find_strategy
from unembed.train import open_pairs

WRONG = 0.1  # share of a text's visible tokens that `drafts` replaces
SHIFTED = 0.25  # share of rows in which `drafts` moves a run of tokens by one place
LONGEST_RUN = 16
LIKELY = 64  # wrong tokens are drawn from so many that the vector suggests
PREFIX = 8


def embed(model: Denoiser, xt: Tensor, causal: Tensor | None) -> Tensor:
    """Embeddings (B, T, D) of what each place is given: its own token, or in causal rows the one before."""
    if causal is None:
        return model.tokens(xt)
    before = F.pad(xt[:, :-1], (1, 0), value=model.config.mask_id)
    return model.tokens(torch.where(causal[:, None], before, xt)) + causal[:, None, None] * model.shifted


def run_blocks(
    model: Denoiser,
    x: Tensor,
    condition: tuple[Tensor, ...],
    t: Tensor | None,
    causal: Tensor | None,
    *,
    prefix: int = 0,
) -> Tensor:
    """Run the blocks and the last norm on inputs (B, T, D) that are not just tokens; all see the prefix."""
    T = x.shape[1]
    ahead = None
    if causal is not None:
        places = torch.arange(T, device=x.device)
        ahead = causal[:, None, None, None] & (places > places[:, None].clamp_min(prefix - 1))
    turns = None if model.turns is None else model.turns[:, :T]
    x = x.to(condition[-1].dtype)
    for block, known in zip(model.blocks, condition, strict=False):
        x = block(x, known, t, turns, ahead)
    return adaln(x, *model.modulation.split(condition[-1], t))


def masked_rows(rows: int, config: Config) -> int:
    """How many rows of a batch are not read left to right."""
    return rows - int(rows * config.diffusion.causal_share)


class Rerouted:
    """A model as the usual loss asks it, its trunk given something else."""

    def __init__(self, model: Any, hidden: Callable[..., Tensor]) -> None:
        """Take the heads of the model, and another way through it."""
        self.hidden, self.head, self.bag = hidden, model.head, model.bag


class SelfConditioned(Denoiser):
    """A denoiser that may be told what it predicted before."""

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
        condition: tuple[Tensor, ...] | None = None,
        causal: Tensor | None = None,
        whole: Tensor | None = None,
        previous: Tensor | None = None,
    ) -> Tensor:
        """Run the trunk; `previous` (B, T, D) are expected token embeddings, zero where there are none."""
        x = embed(self, xt, causal) + self.places[: xt.shape[1]]
        if previous is not None:
            x = x + self.told(previous)
        condition = self.condition(e, drop=drop) if condition is None else condition
        return run_blocks(self, x, condition, t, causal)

    def expected(self, h: Tensor) -> Tensor:
        """Mean embedding (..., D) of the tokens predicted from hidden states (..., D)."""
        return self.head(h).float().softmax(-1).to(h.dtype) @ self.tokens.weight.to(h.dtype)


def self_conditioned_loss(
    model: Any, x0: Tensor, e: Tensor, t: Tensor, masked: Tensor, drop: Tensor, *, config: Config, **more: Any
) -> Tensor:
    """The usual loss; every other masked row is told what the model says of it without being told."""
    causal = more.get("causal")
    told = torch.arange(0, len(x0), 2, device=x0.device)
    if causal is not None:
        told = chosen_places(~causal, masked_rows(len(x0), config))[::2]
    unknown = masked[told]
    xt = x0[told].masked_fill(unknown, config.model.mask_id)
    h = model.hidden(xt, e[told], t=t[told], drop=drop[told])
    # Detached, not in `no_grad`, whose half-precision copies of the weights autocast would hand to the
    # second pass.
    means = model.expected(h).detach() * unknown[..., None]
    previous = means.new_zeros(*x0.shape, means.shape[-1]).index_copy(0, told, means)
    aware: Any = Rerouted(model, partial(model.hidden, previous=previous))
    return masked_loss(aware, x0, e, t, masked, drop, config=config, **more)


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
        previous = model.expected(h).float()
        kept = chosen.commit(Proposal(chosen.select(masked, moment), tokens, sure), moment)
        ids = fill_after_end(torch.where(kept, tokens, ids), m)
    return ids


def told_modes(run: Run, inverter: Inverter) -> Modes:
    """The usual ways to decode, with self-conditioning where masks are filled."""

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

    told = {"c8": by("confidence", 8), "c32": by("confidence", 32), "s32": by("sequential", 32)}
    return {**plain_modes(inverter), **told}


def drafts_loss(
    model: Any,
    x0: Tensor,
    e: Tensor,
    t: Tensor,
    masked: Tensor,
    drop: Tensor,
    *,
    config: Config,
    count: int,
    causal: Tensor | None = None,
    hidden: Tensor | None = None,
) -> Tensor:
    """The usual loss on masked rows whose visible tokens are partly wrong, and the same of those tokens."""
    draft = spoil(x0, model.bag(e).detach(), pad_id=config.model.pad_id)
    wrong = (draft != x0) & ~masked
    if causal is not None:
        wrong = wrong & ~causal[:, None]

    def read(xt: Tensor, e: Tensor, **known: Any) -> Tensor:
        return model.hidden(torch.where(wrong, draft, xt), e, **known)

    # About a sixth of what is visible, which is less than half; a place too many goes without loss.
    count = min(x0.numel(), count + masked_rows(len(x0), config) * x0.shape[1] // 10)
    misled: Any = Rerouted(model, read)
    asked = masked | wrong
    return masked_loss(
        misled, x0, e, t, asked, drop, config=config, count=count, causal=causal, hidden=hidden
    )


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
    scores, likely = bag.float().topk(min(LIKELY, bag.shape[1]), dim=-1)
    noise = -torch.log(-torch.log(torch.rand((B, T, scores.shape[1]), device=device).clamp(1e-6, 1 - 1e-6)))
    words = likely.gather(1, (scores[:, None] + noise).argmax(-1))
    replaced = (torch.rand((B, T), device=device) < WRONG) & (x0 != pad_id)
    return torch.where(replaced, words, draft)


class FixedSpans(FreshSpans):
    """The first tokens of every passage, in a new order each epoch: what cached pairs would hold."""

    _epoch = -1
    _order: Tensor

    def _draw(self, step: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Take the next passages of the epoch; the batch that reaches its end goes on at its beginning."""
        epoch, first = divmod(step * count, self.train_count)
        if epoch != self._epoch:
            generator = step_generator(self.seed, epoch, stream=1, device=self.device)
            self._order = torch.randperm(self.train_count, generator=generator, device=self.device)
            self._epoch = epoch
        places = torch.arange(first, first + count, device=self.device) % self.train_count
        begin, stop = (self.offsets[self._order[places] + more] for more in (0, 1))
        return begin, (stop - begin).clamp_max(self.max_tokens), begin, torch.zeros_like(begin)


def open_fixed(config: Config, data: PreparedData, group: Group) -> Pairs:
    """Open spans that are the same every epoch."""
    c, fresh = config.train, open_pairs(config, data, group)
    assert isinstance(fresh, FreshSpans)
    return FixedSpans(
        data, encoder=fresh.encoder, batch_size=c.batch_size, validation=c.validation, seed=c.seed,
        device=group.device, compile=c.compile,
    )  # fmt: skip


class Settled(Modulation):
    """Scales, shifts and gates that are learned, but the same for every vector."""

    def __init__(self, config: ModelConfig, chunks: int) -> None:
        """All zero at first, as AdaLN."""
        nn.Module.__init__(self)
        self.chunks, self.time = chunks, None
        self.values = nn.Parameter(torch.zeros(chunks * config.hidden))

    def of(self, c: Tensor) -> Tensor:
        """Return the same for each row of c, (B, chunks * D)."""
        return self.values.to(c.dtype).expand(len(c), -1)


class Prefixed(Denoiser):
    """A denoiser that reads the vector as tokens in front of the text."""

    # Left to right, whole rows are run at each place.
    read = None  # type: ignore[assignment]

    def __init__(self, config: ModelConfig) -> None:
        """Build the trunk for the longer rows, its norms blind to the vector."""
        super().__init__(replace(config, max_tokens=config.max_tokens + PREFIX))
        self.config = config  # what decoding asks about is the text
        self.prefix = nn.Linear(config.hidden, PREFIX * config.hidden)
        nn.init.normal_(self.prefix.weight, std=0.02)
        self.modulation = Settled(config, 2)
        for block in self.blocks:
            block.modulation = Settled(config, 6)

    def condition(
        self, e: Tensor, *, drop: Tensor | None = None, whole: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The prefix (B, PREFIX, D), and what the norms are told."""
        prefix = self.prefix(self.projection(e, drop)).unflatten(1, (PREFIX, -1))
        return prefix, *super().condition(e, drop=drop)

    def hidden(
        self,
        xt: Tensor,
        e: Tensor,
        *,
        t: Tensor | None = None,
        drop: Tensor | None = None,
        condition: tuple[Tensor, ...] | None = None,
        causal: Tensor | None = None,
        whole: Tensor | None = None,
    ) -> Tensor:
        """Run the trunk on the prefix and the text; return the text's states."""
        prefix, *known = self.condition(e, drop=drop) if condition is None else condition
        text = embed(self, xt, causal).to(prefix.dtype)
        x = torch.cat((prefix, text), 1) + self.places[: PREFIX + xt.shape[1]]
        return run_blocks(self, x, tuple(known), t, causal, prefix=PREFIX)[:, PREFIX:]


VARIANTS: dict[str, dict[str, Any]] = {
    "self-conditioning": {"network": SelfConditioned, "loss": self_conditioned_loss, "modes": told_modes},
    "drafts": {"loss": drafts_loss},
    "cached": {"pairs": open_fixed},
    "prefix": {"network": Prefixed},
}


def main() -> None:
    """Train one variant for the given minutes and print its figures."""
    parser = arguments(__doc__ or "")
    args = parser.parse_intermixed_args()
    args.fields = ["embeds=False", "embed_share=0.0", *args.fields]  # none of these networks guesses vectors
    if args.name not in VARIANTS:
        parser.error(f"there is no variant {args.name!r}; choose from {', '.join(VARIANTS)}.")
    train_and_measure(args, **VARIANTS[args.name])


if __name__ == "__main__":
    main()

"""The decoding loop: a model, vectors and a strategy in, drafts out, one a step.

Knows tensors only, no text. Randomness is drawn for all rows before the loop, so the answer to a
row does not depend on the rows that happen to share its batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unembed.config import DiffusionConfig, ModelConfig
from unembed.errors import UnembedError
from unembed.strategies import Moment, Proposal, RevealSchedule, Strategy, check_steps, find_strategy


class Model(Protocol):
    """What decoding needs of a model."""

    config: ModelConfig

    def hidden(self, xt: Tensor, e: Tensor, *, t: Tensor | None = None, drop: Tensor | None = None) -> Tensor:
        """Final hidden states."""
        ...

    def head(self, h: Tensor) -> Tensor:
        """Logits of hidden states."""
        ...


@dataclass(frozen=True)
class DecodeOptions:
    """How to decode: the strategy and its knobs, the same for every row."""

    strategy: str = "confidence"
    steps: int = 8
    temperature: float | None = None  # None: the strategy's own
    guidance: float = 1.0  # 1: the conditional model as it is
    remask: float = 0.05  # share masked again by euler-remask
    restart: float = 0.5  # t0 to which two-stage noises its hypothesis
    reveal: RevealSchedule = "linear"  # pace of confidence

    def __post_init__(self) -> None:
        """Check the values that do not depend on a model."""
        find_strategy(self.strategy)
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise UnembedError(f"temperature must be 0 or more, not {self.temperature}.")
        if not 0 <= self.guidance < float("inf"):
            raise UnembedError(f"guidance must be 0 or more (1 is plain), not {self.guidance}.")
        for name, value in (("remask", self.remask), ("restart", self.restart)):
            if not 0 <= value <= 1:
                raise UnembedError(f"{name} must be between 0 and 1, not {value}.")
        if self.reveal not in ("linear", "cosine"):
            raise UnembedError(f"reveal must be linear or cosine, not {self.reveal!r}.")


@dataclass(frozen=True)
class Draft:
    """All rows after a step."""

    ids: Tensor  # (B, T), masked where nothing is decided
    confidence: Tensor  # (B, T), recorded when the token was revealed; 0 where masked
    passes: Tensor  # (B,) forward passes so far


def draw_uniforms(first: int, stop: int, *, steps: int, length: int, seed: int) -> Tensor:
    """Uniforms (rows, steps, 2, T) for rows first to stop: for what to reveal and which token.

    A row's draws depend on the seed and its number alone (a counter-based generator is advanced
    to it), so neither the batch size nor the device changes a seeded answer.
    """
    if not 0 <= seed < 2**128:
        raise UnembedError(f"seed must be 0 or more, and below 2**128, not {seed}.")
    draws = -(-steps * 2 * length // 4) * 4  # one counter gives four draws
    bits = np.random.Philox(key=seed).advance(first * draws // 4)
    rows = np.random.Generator(bits).random((stop - first, draws))[:, : steps * 2 * length]
    # Rounded down to float32, lest 0.99999999 become 1.
    uniforms = torch.from_numpy(rows).reshape(-1, steps, 2, length)
    return uniforms.float().clamp_max(1 - 2**-24)


@torch.inference_mode()
def decode(
    model: Model,
    e: Tensor,
    *,
    options: DecodeOptions,
    diffusion: DiffusionConfig,
    uniforms: Tensor,
    start: Draft | None = None,
    avoid: Tensor | None = None,
) -> Iterator[Draft]:
    """Yield the draft after each step, the last one complete.

    Rows with nothing left to reveal leave the batch; what follows an end is filled with padding.
    Decoding starts from nothing but masks, or from a draft with some, and gives no place the token
    that `avoid` (B, T) names for it; [MASK], which is never predicted, names none.
    """
    config = model.config
    strategy = find_strategy(options.strategy)
    check_steps(options.steps, config.max_tokens)
    start = blank(len(e), config, device=e.device) if start is None else start
    ids, confidence, passes = start.ids.clone(), start.confidence.clone(), start.passes.clone()
    active = (ids == config.mask_id).any(1).nonzero().squeeze(1)
    for step in range(options.steps):
        if len(active):
            moment = Moment(
                step,
                options.steps,
                uniforms[active, step, 0],
                config.pad_id,
                diffusion,
                options.remask,
                options.restart,
                options.reveal,
            )
            rows, sure = _advance(
                model, ids[active], confidence[active], e[active], uniforms[active, step, 1],
                strategy=strategy, moment=moment, options=options,
                avoid=None if avoid is None else avoid[active],
            )  # fmt: skip
            ids[active], confidence[active] = rows, sure
            passes[active] += 1 if options.guidance in (0, 1) else 2
            if strategy.final(moment):
                ids[active] = fill_after_end(rows, config)
                active = active[(ids[active] == config.mask_id).any(1)]
        yield Draft(ids.clone(), confidence.clone(), passes.clone())


def blank(rows: int, config: ModelConfig, *, device: torch.device) -> Draft:
    """Make the draft in which nothing is decided."""
    shape = rows, config.max_tokens
    return Draft(
        torch.full(shape, config.mask_id, device=device),
        torch.zeros(shape, device=device),
        torch.zeros(rows, dtype=torch.long, device=device),
    )


def _advance(
    model: Model, ids: Tensor, confidence: Tensor, e: Tensor, uniforms: Tensor,
    *, strategy: Strategy, moment: Moment, options: DecodeOptions, avoid: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Take one step with every row: predict, commit, perhaps mask again."""
    mask_id = model.config.mask_id
    masked = ids == mask_id
    where = strategy.select(masked, moment)
    t = strategy.time(masked.float().mean(1), moment.diffusion)
    temperature = strategy.temperature if options.temperature is None else options.temperature
    logits = guided_logits(model, ids, e, t=t, where=where, guidance=options.guidance)
    if avoid is not None:
        logits = logits.scatter(1, avoid[where][:, None], float("-inf"))
    tokens, sure = pick(logits, uniforms[where], temperature=temperature)
    proposal = Proposal(where, ids.masked_scatter(where, tokens), confidence.masked_scatter(where, sure))
    kept = strategy.commit(proposal, moment)
    ids = torch.where(kept, proposal.tokens, ids)
    confidence = torch.where(kept, proposal.confidence, confidence)
    if strategy.remask is not None:
        again = strategy.remask(confidence, ids != mask_id, moment)
        ids, confidence = ids.masked_fill(again, mask_id), confidence.masked_fill(again, 0.0)
    return ids, confidence


def guided_logits(
    model: Model, ids: Tensor, e: Tensor, *, t: Tensor, where: Tensor, guidance: float
) -> Tensor:
    """Logits (N, V) at the N places of `where`, moved away from the null condition's by guidance."""

    def logits(rows: Tensor, dropped: bool) -> Tensor:
        drop = torch.full((len(rows),), dropped, device=rows.device)
        return model.head(model.hidden(rows, e, t=t, drop=drop)[where]).float()

    if guidance == 1:
        return logits(ids, False)
    free = logits(ids, True)
    if guidance == 0:
        return free
    mixed = free + guidance * (logits(ids, False) - free)
    return mixed.index_fill(-1, torch.tensor(model.config.mask_id, device=ids.device), float("-inf"))


def pick(logits: Tensor, uniforms: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Choose a token for each row of logits (N, V) and give its probability at temperature 1."""
    total = logits.logsumexp(-1)
    best, tokens = logits.max(-1)
    if temperature > 0:
        # Inverse of the cumulative distribution: one uniform a token, whatever the vocabulary.
        cumulative = F.softmax(logits / temperature, dim=-1).cumsum(-1)
        target = (uniforms * cumulative[:, -1])[:, None]
        drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
        tokens = torch.where(drawn < logits.shape[-1], drawn, tokens)
        best = logits.gather(1, tokens[:, None]).squeeze(1)
    return tokens, (best - total).exp()


def fill_after_end(ids: Tensor, config: ModelConfig) -> Tensor:
    """Put padding at the masked places after a row's first end: the text is cut there anyway."""
    ended = (ids == config.end_id).cumsum(1) > 0
    return ids.masked_fill(ended & (ids == config.mask_id), config.pad_id)

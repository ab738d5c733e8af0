"""The decoding loop: a model, vectors and a strategy in, drafts out, one a step.

Knows tensors only, no text. Randomness is drawn for all rows before the loop, so the answer to a
row does not depend on the rows that happen to share its batch.

On a GPU the loop never makes the device wait for the host. How many places need logits, and how
many rows are left, the device counts itself; the host reads the first when the trunk is already
queued behind it, and the second a step late.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unembed.config import DiffusionConfig, ModelConfig
from unembed.diffusion import chosen_places
from unembed.errors import UnembedError
from unembed.strategies import Moment, Proposal, RevealSchedule, Strategy, check_steps, find_strategy

# Logits held at once: on a CPU about what its caches hold, on a GPU what bounds the memory.
_HEAD_ROOM = {"cpu": 2**23, "cuda": 2**28}
_PICK_ROOM = {"cpu": 2**20, "cuda": 2**28}


class Model(Protocol):
    """What decoding needs of a model.

    One that also has `condition(e, drop=...)` is asked once for all that depends on the vectors
    alone, a tuple of tensors (B, ...), and given it back as `hidden(..., condition=...)`. One that also
    has `cache` and `read` is asked, left to right, for a place at a time: see `model.Denoiser`.
    """

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

    def fit(self, config: ModelConfig) -> DecodeOptions:
        """Check the options against a model; a causal strategy takes as many steps as there are places."""
        check_steps(self.steps, config.max_tokens)
        if not find_strategy(self.strategy).causal:
            return self
        if not config.causal:
            raise UnembedError(
                f"this model does not read left to right, as {self.strategy} does; choose another strategy, "
                "or train with causal and causal_share."
            )
        return replace(self, steps=config.max_tokens)


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


@dataclass(frozen=True)
class Trunk:
    """A model's trunk and the vectors of some rows, one condition for each pass of a step."""

    model: Model
    e: Tensor
    drops: tuple[Tensor, ...]  # (B,) each: who does not see the vector in that pass
    conditions: tuple[tuple[Tensor, ...], ...]  # one a pass, if the model can work it out beforehand
    causal: bool = False
    caches: tuple[tuple[Tensor, ...], ...] = ()  # one a pass, if rows are read a place at a time

    @staticmethod
    def of(model: Model, e: Tensor, *, guidance: float, causal: bool = False) -> Trunk:
        """Prepare the passes that guidance asks for: the null condition's first, if it is among them."""
        blind = [True] * (guidance != 1) + [False] * (guidance != 0)
        drops = tuple(torch.full((len(e),), dropped, device=e.device) for dropped in blind)
        condition = getattr(model, "condition", None)
        conditions = () if condition is None else tuple(condition(e, drop=drop) for drop in drops)
        return Trunk(model, e, drops, conditions, causal)

    def take(self, rows: Tensor) -> Trunk:
        """Return the trunk of some of the rows."""
        conditions, caches = (
            tuple(tuple(part[rows] for part in parts) for parts in of_passes)
            for of_passes in (self.conditions, self.caches)
        )
        drops = tuple(drop[rows] for drop in self.drops)
        return Trunk(self.model, self.e[rows], drops, conditions, self.causal, caches)

    def hidden(self, ids: Tensor, t: Tensor) -> list[Tensor]:
        """Final hidden states (B * T, D) of each pass."""
        known: list[dict[str, Any]] = [{"condition": c} for c in self.conditions] or [{}] * len(self.drops)
        more = {"causal": torch.ones_like(self.drops[0])} if self.causal else {}
        passes = zip(self.drops, known, strict=True)
        return [self.model.hidden(ids, self.e, t=t, drop=d, **k, **more).flatten(0, 1) for d, k in passes]

    def begin(self, ids: Tensor, t: Tensor) -> Trunk:
        """Return the trunk with what stands in front of the masks read, if it is to be read but once.

        It is not where the model keeps nothing, or where something behind a mask is known: that would have
        to be read again.
        """
        if not self.causal or not self.conditions or getattr(self.model, "read", None) is None:
            return self
        model: Any = self.model
        masked = ids == model.config.mask_id
        behind = masked.cumsum(1) > 0
        known, before = Count(behind & ~masked), Count(~behind & masked.any(1, keepdim=True))
        if known.read():
            return self
        trunk = replace(self, caches=tuple(model.cache(condition) for condition in self.conditions))
        if before.read():
            # Whole rows: were they cut after the longest beginning, its length would change last bits.
            trunk.read(ids, t, torch.arange(ids.shape[1], device=ids.device).expand_as(ids))
        return trunk

    def read(self, ids: Tensor, t: Tensor, where: Tensor) -> list[Tensor]:
        """Final hidden states (B * N, D) of each pass at places (B, N); all before them have been read."""
        model: Any = self.model
        passes = zip(self.conditions, self.caches, strict=True)
        return [model.read(ids, where, t=t, condition=c, cache=k).flatten(0, 1) for c, k in passes]


class Count:
    """How many are true, which a GPU may still be working out; `read` waits for that and no more."""

    def __init__(self, true: Tensor) -> None:
        """Start counting."""
        self._value = true.sum().to("cpu", non_blocking=True)  # into pinned memory, without a wait
        self._done = torch.cuda.Event() if true.is_cuda else None
        if self._done is not None:
            self._done.record()

    def read(self) -> int:
        """Return the number."""
        if self._done is not None:
            self._done.synchronize()
        return int(self._value)


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
    options = options.fit(config)
    strategy = find_strategy(options.strategy)
    whole = blank(len(e), config, device=e.device) if start is None else start
    now, rows = whole, None  # the rows that are worked on, and which of the whole they are; None: all
    active = (now.ids == config.mask_id).any(1)
    trunk = Trunk.of(model, e, guidance=options.guidance, causal=strategy.causal)
    trunk = trunk.begin(now.ids, strategy.time((now.ids == config.mask_id).float().mean(1), diffusion))
    gpu = _is_gpu(e)
    lag = 1 if gpu else 0
    counts = [Count(active)]
    for step in range(options.steps):
        # A GPU is not waited for: its number is a step old, so no row is missed, and some are done.
        left = counts[step - lag].read() if step >= lag else len(active)
        if (size := _batch(left, len(active), gpu=gpu)) < len(active):
            stay = chosen_places(active, size)
            whole, rows = _put(whole, rows, now), stay if rows is None else rows[stay]
            now, active, trunk = _take(now, stay), active[stay], trunk.take(stay)
        if size:
            reveal, choose = (_pick_rows(uniforms[:, step, kind], rows) for kind in (0, 1))
            moment = Moment(
                step,
                options.steps,
                reveal,
                config.pad_id,
                diffusion,
                options.remask,
                options.restart,
                options.reveal,
            )
            ids, confidence = _advance(
                trunk, now, active, choose, strategy=strategy, moment=moment, options=options,
                avoid=None if avoid is None else _pick_rows(avoid, rows),
            )  # fmt: skip
            passes = now.passes + len(trunk.drops) * active
            if strategy.final(moment):
                ids = fill_after_end(ids, config)
                active = (ids == config.mask_id).any(1)
            now = Draft(ids, confidence, passes)
        counts.append(Count(active))
        yield _put(whole, rows, now)


def _is_gpu(e: Tensor) -> bool:
    """Whether the host runs ahead of the device."""
    return e.is_cuda


def _batch(left: int, have: int, *, gpu: bool) -> int:
    """How many rows to go on with when `left` of those at hand are not done.

    A CPU drops each row that is done. A GPU hardly minds them, and few sizes mean few shapes: it
    halves the batch when it can.
    """
    if not gpu or not left:
        return left
    while left <= have // 2:
        have //= 2
    return have


def _pick_rows(values: Tensor, rows: Tensor | None) -> Tensor:
    """Return some of the rows, or all."""
    return values if rows is None else values[rows]


def _take(draft: Draft, rows: Tensor) -> Draft:
    """Return a draft of some of the rows."""
    return Draft(*(getattr(draft, f.name)[rows] for f in fields(Draft)))


def _put(whole: Draft, rows: Tensor | None, some: Draft) -> Draft:
    """Return the whole draft with some of its rows replaced."""
    if rows is None:
        return some
    return Draft(*(getattr(whole, f.name).index_copy(0, rows, getattr(some, f.name)) for f in fields(Draft)))


def blank(rows: int, config: ModelConfig, *, device: torch.device) -> Draft:
    """Make the draft in which nothing is decided."""
    shape = rows, config.max_tokens
    return Draft(
        torch.full(shape, config.mask_id, device=device),
        torch.zeros(shape, device=device),
        torch.zeros(rows, dtype=torch.long, device=device),
    )


def _advance(
    trunk: Trunk, now: Draft, active: Tensor, uniforms: Tensor,
    *, strategy: Strategy, moment: Moment, options: DecodeOptions, avoid: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Take one step with every row: predict, commit, perhaps mask again."""
    mask_id = trunk.model.config.mask_id
    masked = now.ids == mask_id
    where = strategy.select(masked, moment)
    asked = Count(where)
    t = strategy.time(masked.float().mean(1), moment.diffusion)
    if trunk.caches:  # one place a row; a row that is done reads its first again
        hidden, each = trunk.read(now.ids, t, where.int().argmax(1, keepdim=True)), where.shape[1]
    else:
        hidden, each = trunk.hidden(now.ids, t), 1
    # The trunk is queued; while it runs the number arrives, and the head is queued behind it.
    places = chosen_places(where, asked.read())
    tokens, sure = predict(
        trunk.model, [h[places // each] for h in hidden], uniforms.flatten()[places],
        guidance=options.guidance,
        temperature=strategy.temperature if options.temperature is None else options.temperature,
        avoid=None if avoid is None else avoid.flatten()[places],
    )  # fmt: skip
    proposal = Proposal(
        where,
        now.ids.flatten().scatter(0, places, tokens).view_as(now.ids),
        now.confidence.flatten().scatter(0, places, sure).view_as(now.confidence),
    )
    kept = strategy.commit(proposal, moment)
    ids = torch.where(kept, proposal.tokens, now.ids)
    confidence = torch.where(kept, proposal.confidence, now.confidence)
    if strategy.remask is not None:
        again = strategy.remask(confidence, ids != mask_id, moment) & active[:, None]
        ids, confidence = ids.masked_fill(again, mask_id), confidence.masked_fill(again, 0.0)
    return ids, confidence


def predict(
    model: Model,
    hidden: list[Tensor],
    uniforms: Tensor,
    *,
    guidance: float,
    temperature: float,
    avoid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose a token for each of N places and give its probability, a part of the logits at a time.

    `hidden` holds their states (N, D) for each pass, `avoid` (N,) the tokens they must not get.
    """
    device, V = uniforms.device.type, model.config.vocab_size
    head_rows, pick_rows = (max(1, room.get(device, 2**23) // V) for room in (_HEAD_ROOM, _PICK_ROOM))
    found: list[tuple[Tensor, Tensor]] = []
    for first in range(0, max(1, len(uniforms)), head_rows):
        part = slice(first, first + head_rows)
        logits = guided_logits(model, [h[part] for h in hidden], guidance=guidance)
        if avoid is not None:
            logits = logits.scatter_(1, avoid[part][:, None], float("-inf"))
        pairs = zip(logits.split(pick_rows), uniforms[part].split(pick_rows), strict=True)
        found += [pick(some, draws, temperature=temperature) for some, draws in pairs]
    tokens, sure = zip(*found, strict=True)
    return (tokens[0], sure[0]) if len(found) == 1 else (torch.cat(tokens), torch.cat(sure))


def guided_logits(model: Model, hidden: list[Tensor], *, guidance: float) -> Tensor:
    """Logits (N, V) of hidden states, moved away from the null condition's, which come first, by guidance."""
    if len(hidden) == 1:
        return model.head(hidden[0])
    free, given = (model.head(h).float() for h in hidden)
    # Where both are -inf, at [MASK] for one, their difference is no number.
    return (free + guidance * (given - free)).nan_to_num_(
        nan=float("-inf"), posinf=float("inf"), neginf=float("-inf")
    )


def pick(logits: Tensor, uniforms: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Choose a token for each row of logits (N, V) and give its probability at temperature 1, in float32."""
    tokens = logits.argmax(-1)
    chances = F.softmax(logits, dim=-1, dtype=torch.float32)
    if temperature > 0:
        # Inverse of the cumulative distribution: one uniform a token, whatever the vocabulary.
        scaled = chances if temperature == 1 else F.softmax(logits.float() / temperature, dim=-1)
        cumulative = scaled.cumsum(-1)
        target = (uniforms * cumulative[:, -1])[:, None]
        drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
        tokens = torch.where(drawn < logits.shape[-1], drawn, tokens)
    return tokens, chances.gather(1, tokens[:, None]).squeeze(1)


def fill_after_end(ids: Tensor, config: ModelConfig) -> Tensor:
    """Put padding at the masked places after a row's first end: the text is cut there anyway."""
    ended = (ids == config.end_id).cumsum(1) > 0
    return ids.masked_fill(ended & (ids == config.mask_id), config.pad_id)

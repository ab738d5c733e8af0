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
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unembed.beam import (
    BEAMS,
    LOOKS,
    MOST_BEAMS,
    MOST_LOOKS,
    beam_search,
    one_by_one,
    search_rows,
    split_texts,
)
from unembed.choice import checks
from unembed.config import DiffusionConfig, ModelConfig
from unembed.diffusion import chosen_places
from unembed.drafts import choose
from unembed.errors import UnembedError, check_number, check_seed
from unembed.strategies import (
    AUTO,
    Moment,
    Proposal,
    RevealSchedule,
    Strategy,
    check_steps,
    find_strategy,
    resolve,
)
from unembed.trunk import Count, Model, Trunk, is_gpu, logit_parts, next_batch

STEPS = 8  # of a strategy that takes any number, if none is asked for
MOST_DRAFTS = 64
DRAFTS_TEMPERATURE = 0.7  # at 1 too many words are wrong to choose from, at 0.5 drafts are too much alike


@dataclass(frozen=True)
class DecodeOptions:
    """How to decode: the strategy and its knobs, the same for every row."""

    strategy: str = AUTO
    steps: int | None = None  # None: the strategy's own, which is 8, or left to right all places
    temperature: float | None = None  # None: the strategy's own; if that is 0, of several drafts 0.7
    guidance: float = 1.0  # 1: the conditional model as it is
    remask: float = 0.05  # share masked again by euler-remask
    restart: float = 0.5  # t0 to which two-stage noises its hypothesis
    reveal: RevealSchedule = "linear"  # pace of confidence
    beams: int = BEAMS  # beginnings of a text that beam keeps
    drafts: int = 1  # texts drawn for each vector, of which one is chosen; by all but beam
    looks: int = LOOKS  # how often beam looks where its beginnings lead, if the model guesses vectors

    def __post_init__(self) -> None:
        """Check the values that do not depend on a model."""
        strategy = None if self.strategy == AUTO else find_strategy(self.strategy)
        if self.steps is not None:
            check_number("steps", self.steps, "a whole number", whole=True)
        if self.temperature is not None:
            check_number("temperature", self.temperature, "0 or more", low=0)
        check_number("guidance", self.guidance, "0 or more (1 is plain)", low=0)
        for name, share in (("remask", self.remask), ("restart", self.restart)):
            check_number(name, share, "between 0 and 1", low=0, high=1)
        if self.reveal not in ("linear", "cosine"):
            raise UnembedError(f"reveal must be linear or cosine, not {self.reveal!r}.")
        for name, count, least, most in (
            ("beams", self.beams, 1, MOST_BEAMS),
            ("drafts", self.drafts, 1, MOST_DRAFTS),
            ("looks", self.looks, 0, MOST_LOOKS),
        ):
            check_number(
                name, count, f"a whole number from {least} to {most}", low=least, high=most, whole=True
            )
        if strategy is not None and strategy.beams:
            self._check_nothing_is_drawn()
        if self.drafts > 1 and self.temperature == 0:
            raise UnembedError(
                "drafts differ by what is drawn, and at temperature 0 all would be the same; "
                "leave temperature out, or drafts."
            )

    def _check_nothing_is_drawn(self) -> None:
        """Refuse what only tokens that are drawn can have."""
        for name, given in (("temperature", self.temperature), ("drafts", self.drafts > 1)):
            if given:
                raise UnembedError(
                    f"{self.strategy} looks for the likeliest text and draws nothing; leave {name} out, "
                    "or choose another strategy."
                )

    def fit(self, config: ModelConfig) -> FittedOptions:
        """Check the options against a model, and settle what they leave to it: the strategy, its steps."""
        strategy = resolve(
            self.strategy, config=config, steps=self.steps, temperature=self.temperature, drafts=self.drafts
        )
        steps = min(STEPS, config.max_tokens) if self.steps is None else self.steps
        check_steps(steps, config.max_tokens)
        if strategy.causal and not config.causal:
            raise UnembedError(
                f"this model does not read left to right, as {strategy.name} does; choose another strategy, "
                "or train with causal and causal_share."
            )
        settled: dict[str, Any] = {
            "strategy": strategy.name,
            "steps": config.max_tokens if strategy.causal else steps,
        }
        if not (config.embeds and self.guidance):  # there is nothing to look at
            settled["looks"] = 0
        if self.drafts > 1 and self.temperature is None:
            settled["temperature"] = strategy.temperature or DRAFTS_TEMPERATURE
        fitted = FittedOptions(**(vars(self) | settled))
        if not fitted.drafting(config):
            raise UnembedError(
                "steps must be at least 2 with drafts, not 1: the last one reads them, to choose one."
            )
        return fitted


@dataclass(frozen=True)
class FittedOptions(DecodeOptions):
    """Options as a model takes them: the strategy is one of `STRATEGIES`, and the steps are a number."""

    strategy: str = "confidence"
    steps: int = STEPS

    def drafting(self, config: ModelConfig) -> int:
        """How many of the steps reveal tokens: all, unless the last one reads drafts to choose between them.

        Drafts that were written left to right need not be read: how likely they are is known.
        """
        reads = self.drafts > 1 and config.causal and not find_strategy(self.strategy).causal
        return self.steps - reads

    @property
    def rows(self) -> int:
        """How many rows of a batch a text takes."""
        beams = find_strategy(self.strategy).beams
        return search_rows(self.beams, self.looks) if beams else self.drafts

    def draw(self, first: int, stop: int, *, config: ModelConfig, seed: int) -> Tensor:
        """Uniforms (rows, drafts * steps, 2, T) for vectors first to stop, as `decode` takes them.

        A draft draws what a vector of its own would: the k-th of vector n what vector n * drafts + k does.
        """
        steps, length = self.drafting(config), config.max_tokens
        drawn = draw_uniforms(first * self.drafts, stop * self.drafts, steps=steps, length=length, seed=seed)
        return drawn.reshape(stop - first, self.drafts * steps, 2, length)


@dataclass(frozen=True)
class Draft:
    """All rows after a step."""

    ids: Tensor  # (B, T), masked where nothing is decided
    confidence: Tensor  # (B, T), recorded when the token was revealed; 0 where masked
    passes: Tensor  # (B,) forward passes so far
    likeness: Tensor  # (B,) of whole texts chosen from several, as `choice` guesses it; NaN where it does not

    def take(self, rows: Tensor | slice) -> Draft:
        """Return a draft of some of the rows."""
        return Draft(*(getattr(self, f.name)[rows] for f in fields(self)))


def draw_uniforms(first: int, stop: int, *, steps: int, length: int, seed: int) -> Tensor:
    """Uniforms (rows, steps, 2, T) for rows first to stop: for what to reveal and which token.

    A row's draws depend on the seed and its number alone (a counter-based generator is advanced
    to it), so neither the batch size nor the device changes a seeded answer.
    """
    check_seed(seed)
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
    that `avoid` (B, T) names for it; [MASK], which is never predicted, names none. Beams start from
    nothing, and avoid nothing. Of several drafts of each vector the first is shown, and after the last step
    the one that was chosen; `uniforms` are as `FittedOptions.draw` makes them.
    """
    config = model.config
    options = options.fit(config)
    strategy = find_strategy(options.strategy)
    if strategy.beams:
        yield from _best_beams(model, e, options=options, start=start, avoid=avoid)
        return
    start = blank(len(e), config, device=e.device) if start is None else start
    if options.drafts > 1:
        parts = [
            _best_drafts(
                model, e[part], options=options, diffusion=diffusion, uniforms=uniforms[part],
                start=start.take(part), avoid=None if avoid is None else avoid[part],
            )
            for part in split_texts(e, each=options.drafts)
        ]  # fmt: skip
        yield from one_by_one(parts)
        return
    trunk = Trunk.of(model, e, guidance=options.guidance, causal=strategy.causal)
    yield from _reveal(trunk, start, options=options, diffusion=diffusion, uniforms=uniforms, avoid=avoid)


def _reveal(
    trunk: Trunk,
    whole: Draft,
    *,
    options: FittedOptions,
    diffusion: DiffusionConfig,
    uniforms: Tensor,
    avoid: Tensor | None,
) -> Iterator[Draft]:
    """Yield the draft of each row after each step, going by the strategy."""
    config, strategy = trunk.model.config, find_strategy(options.strategy)
    now, rows = whole, None  # the rows that are worked on, and which of the whole they are; None: all
    active = (now.ids == config.mask_id).any(1)
    trunk = trunk.begin(now.ids, strategy.time((now.ids == config.mask_id).float().mean(1), diffusion))
    gpu = is_gpu(trunk.e)
    lag = 1 if gpu else 0
    counts = [Count(active)]
    for step in range(options.steps):
        # A GPU is not waited for: its number is a step old, so no row is missed, and some are done.
        left = counts[step - lag].read() if step >= lag else len(active)
        if (size := next_batch(left, len(active), gpu=gpu)) < len(active):
            stay = chosen_places(active, size)
            whole, rows = _put(whole, rows, now), stay if rows is None else rows[stay]
            now, active, trunk = now.take(stay), active[stay], trunk.take(stay)
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
            now = replace(now, ids=ids, confidence=confidence, passes=passes)
        counts.append(Count(active))
        yield _put(whole, rows, now)


def _best_beams(
    model: Model, e: Tensor, *, options: DecodeOptions, start: Draft | None, avoid: Tensor | None
) -> Iterator[Draft]:
    """Yield the best of the beams after each step."""
    known = start is not None and Count(start.ids != model.config.mask_id).read()
    if known or avoid is not None:
        raise UnembedError(f"{options.strategy} writes whole texts; choose another strategy to fill masks.")
    for found in beam_search(model, e, beams=options.beams, looks=options.looks, guidance=options.guidance):
        passes = found.passes if start is None else found.passes + start.passes
        yield Draft(found.ids[:, 0], found.confidence[:, 0], passes, found.likeness[:, 0])


def _best_drafts(
    model: Model,
    e: Tensor,
    *,
    options: FittedOptions,
    diffusion: DiffusionConfig,
    uniforms: Tensor,
    start: Draft,
    avoid: Tensor | None,
) -> Iterator[Draft]:
    """Yield the first of each vector's drafts after each step, and at last the best of them."""
    shape, steps = (len(e), options.drafts), options.drafting(model.config)
    rows = torch.arange(len(e) * options.drafts, device=e.device) // options.drafts
    causal = find_strategy(options.strategy).causal
    trunk = Trunk.of(model, e, guidance=options.guidance, causal=causal).take(rows)
    begun = start.take(rows)
    for step, draft in enumerate(
        _reveal(
            trunk, replace(begun, passes=torch.zeros_like(begun.passes)),
            options=replace(options, steps=steps, drafts=1), diffusion=diffusion,
            uniforms=uniforms.unflatten(1, (options.drafts, steps)).flatten(0, 1),
            avoid=None if avoid is None else avoid[rows],
        ),
        1,
    ):  # fmt: skip
        ids, confidence = draft.ids.unflatten(0, shape), draft.confidence.unflatten(0, shape)
        passes = start.passes + draft.passes.view(shape).sum(1)
        if step < options.steps:
            yield replace(start, ids=ids[:, 0], confidence=confidence[:, 0], passes=passes)
    reads = steps < options.steps
    best, likeness = choose(trunk, e, ids, confidence, guidance=options.guidance, reads=reads)
    which = torch.arange(len(e), device=e.device), best
    more = reads * len(trunk.drops) + checks(trunk.model, blind=not options.guidance)
    yield Draft(ids[which], confidence[which], passes + more * options.drafts, likeness)


def _pick_rows(values: Tensor, rows: Tensor | None) -> Tensor:
    """Return some of the rows, or all."""
    return values if rows is None else values[rows]


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
        torch.full((rows,), torch.nan, device=device),
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
    found: list[tuple[Tensor, Tensor]] = []
    for part, logits in logit_parts(model, hidden, guidance=guidance):
        if avoid is not None:
            logits.scatter_(1, avoid[part][:, None], float("-inf"))
        found.append(pick(logits, uniforms[part], temperature=temperature))
    tokens, sure = zip(*found, strict=True)
    return (tokens[0], sure[0]) if len(found) == 1 else (torch.cat(tokens), torch.cat(sure))


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

"""Flexible-length masked diffusion (FlexMDM, arXiv 2509.01025), compared with the preset at equal minutes.

    python recipes/flexible.py NAME --data DIR --texts DIR --minutes 1.3 [--process mixed] [field=value ...]

A token of the text is absent, then masked, then itself. The model sees what is there, moved together
behind a start token, and predicts the tokens at the masks and how many tokens are missing in the gap
to the right of each place: no token has to guess its absolute place, and no end is predicted. Text
grows from nothing, by inserting masks into gaps and revealing the surest of them.

What is behind the row's end is padding that the attention sees: the trunk is the preset's, unchanged. Only
the preset's masked rows become such ones; those that are read left to right stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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

from unembed.config import Config, ModelConfig
from unembed.diffusion import causal_rows, chosen_places, sample_t
from unembed.encoders import load_encoder
from unembed.inverter import Inverter
from unembed.model import Denoiser
from unembed.pairs import Batch, Pairs, step_generator
from unembed.run import Run
from unembed.strategies import first_of
from unembed.train import open_pairs

PROCESSES = {"paper": 1 / 4, "wide": 1 / 4, "mixed": 3 / 8}  # and the share of tokens that is masked
GAP_WEIGHT = 0.5  # of one place's gap against one masked token


class FlexibleDenoiser(Denoiser):
    """The trunk and its head, and a second head: how many tokens are missing behind each place."""

    def __init__(self, config: ModelConfig) -> None:
        """Build the trunk for one place more than the text has, and the gap head."""
        super().__init__(replace(config, max_tokens=config.max_tokens + 1))
        self.config = config  # left to right there is no start token
        # The number itself, 0 to T, not its mean alone: a cross entropy needs no care in half precision.
        self.gap = nn.Linear(config.hidden, config.max_tokens + 1)
        nn.init.zeros_(self.gap.weight)
        nn.init.zeros_(self.gap.bias)

    def missing(self, h: Tensor) -> Tensor:
        """Expected number of tokens missing behind each place of h (B, T+1, D)."""
        chances = self.gap(h).float().softmax(-1)
        return (chances * torch.arange(chances.shape[-1], device=h.device)).sum(-1)  # a product would be half


class Noisy(NamedTuple):
    """A batch in the middle of growing; places are the start token's and those of what is there."""

    xt: Tensor  # (B, T+1) ids
    target: Tensor  # (B, T+1) the token of each place; padding at the start and behind the end
    masked: Tensor  # (B, T+1)
    exists: Tensor  # (B, T+1)
    gaps: Tensor  # (B, T+1) tokens missing to the right of each place


def draw_states(
    content: Tensor, s: Tensor, *, process: str, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw which tokens are present and which of them are clean at time s (B,), 0 empty and 1 whole.

    `paper`: inserted at a uniform time, revealed at a uniform time after that. `wide`: the share that is
    present and the share of it that is masked are independent, so that any pace of decoding was met in
    training. `mixed`: as wide in every other row; in the rest nothing is absent, so that more tokens carry
    loss and decoding at a known length is met as often as growing.
    """
    u = torch.rand((3, *content.shape), generator=generator, device=s.device)
    if process == "paper":
        present = content & (u[0] < s[:, None])
        return present, present & (u[0] + (1 - u[0]) * u[1] < s[:, None])
    share = s
    if process == "mixed":
        share = torch.where(torch.arange(len(s), device=s.device) % 2 == 0, s, 1.0)
    present = content & (u[0] < share[:, None])
    return present, present & (u[1] >= u[2, :, :1])


def corrupt(x0: Tensor, present: Tensor, clean: Tensor, config: ModelConfig) -> Noisy:
    """Move what is present of x0 (B, T) together behind a start token, and count what is missing where."""
    B, T = x0.shape
    content = (x0 != config.pad_id) & (x0 != config.end_id)
    before = present.cumsum(1)  # present tokens up to here: the place of a present one, start being 0
    place = torch.where(present, before, T + 1)  # what is absent goes into a column that is cut off
    blank = torch.full((B, T + 2), config.pad_id, device=x0.device)
    start = torch.zeros_like(blank[:, :1])
    target = blank.scatter(1, place, x0)[:, : T + 1]
    seen = torch.where(clean, x0, config.mask_id)
    xt = blank.scatter(1, place, seen).scatter(1, start, config.end_id)[:, : T + 1]
    # An absent token lies in the gap behind the last present one before it.
    gaps = torch.zeros_like(xt).scatter_add(1, before, (content & ~present).to(xt.dtype))
    exists = torch.arange(T + 1, device=x0.device) <= before[:, -1:]
    return Noisy(xt, target, (xt == config.mask_id), exists, gaps)


def read_whole(noisy: Noisy, x0: Tensor, causal: Tensor, hidden: Tensor, config: ModelConfig) -> Noisy:
    """Give rows that are read left to right (B,) their text as it is, but for what is `hidden` (B, T+1)."""
    text = F.pad(x0, (0, 1), value=config.pad_id)
    nothing = torch.zeros_like(text)
    whole = Noisy(
        text.masked_fill(hidden, config.mask_id), text, text != config.pad_id, nothing.bool(), nothing
    )
    return Noisy(*(torch.where(causal[:, None], a, b) for a, b in zip(whole, noisy, strict=True)))


def flexible_loss(
    model: Any,
    noisy: Noisy,
    x0: Tensor,
    e: Tensor,
    drop: Tensor,
    *,
    config: Config,
    count: int,
    causal: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of the cross entropy of masked tokens, of gaps, and of the bag of tokens."""
    xt, target, masked, exists, gaps = noisy
    h = model.hidden(xt, e, drop=drop, causal=causal)
    places = chosen_places(masked, count)
    logits = model.head(h.flatten(0, 1)[places]).float()
    entropy = F.cross_entropy(logits, target.flatten()[places], reduction="none")
    tokens = (entropy * masked.flatten()[places]).sum()
    entropy = F.cross_entropy(model.gap(h).float().flatten(0, 1), gaps.flatten(), reduction="none")
    missing = (entropy * exists.flatten()).sum()
    log_p = F.log_softmax(model.bag(e).float(), dim=-1).gather(1, x0)
    content = (x0 != config.model.pad_id) & (x0 != config.model.end_id)
    return tokens, missing, -(log_p * content).sum()


def mask_bound(rows: int, length: int, *, process: str) -> int:
    """Bound the masked tokens of a batch: five standard deviations above the mean of full rows."""
    # The share masked of what is there, where it is drawn for each row, adds its own spread.
    spread = math.sqrt(rows * length) / 2 + length * math.sqrt(rows) / 6
    return min(rows * length, math.ceil(rows * length * PROCESSES[process] + 5 * spread))


def flexible_step(
    run: Run, pairs: Pairs, loss_function: Callable[..., tuple[Tensor, Tensor, Tensor]], *, process: str
) -> Tensor:
    """Take one optimisation step; return the loss a masked token."""
    c, device = run.config, run.group.device
    B, T = c.train.batch_size, c.model.max_tokens
    x0, e = pairs.batch(run.step, slice(0, B))
    generator = step_generator(c.train.seed, run.step, device=device)
    s = 1 - sample_t(B, c.diffusion, generator=generator)
    drop = torch.rand(B, generator=generator, device=device) < c.diffusion.condition_dropout
    noisy = noise(x0, s, c.model, process=process, generator=generator)
    count, causal = mask_bound(B, T, process=process), None
    if c.diffusion.causal_share:
        causal = causal_rows(B, c.diffusion, device=device)
        hidden = torch.rand((B, T + 1), generator=generator, device=device) < c.diffusion.causal_hidden
        noisy = read_whole(noisy, x0, causal, hidden, c.model)
        whole = int(B * c.diffusion.causal_share)
        count = mask_bound(B - whole, T, process=process) + pairs.most_tokens(whole)
    with run.half():
        tokens, missing, bag = loss_function(
            run.model, noisy, x0, e, drop, config=c, count=count, causal=causal
        )
        loss = tokens + GAP_WEIGHT * missing + c.train.bag_weight * bag
        loss = loss / noisy.masked.sum().clamp_min(1)
    loss.backward()
    run.apply_gradients()
    return loss.detach()


def noise(x0: Tensor, s: Tensor, config: ModelConfig, *, process: str, generator: torch.Generator) -> Noisy:
    """Draw the states of a batch's tokens at times s and apply them."""
    content = (x0 != config.pad_id) & (x0 != config.end_id)
    present, clean = draw_states(content, s, process=process, generator=generator)
    return corrupt(x0, present, clean, config)


@torch.inference_mode()
def validate(run: Run, held_out: Batch, *, process: str) -> dict[str, float]:
    """Mean cross entropy of masked tokens and of gaps on the passages kept aside."""
    c, device = run.config, run.group.device
    x0, e = held_out
    generator = step_generator(c.train.seed, 0, stream=2, device=device)
    s = 1 - sample_t(len(x0), c.diffusion, generator=generator)
    noisy = noise(x0, s, c.model, process=process, generator=generator)
    sums = torch.zeros(2, device=device)
    with run.half():
        for part in torch.arange(len(x0), device=device).split(256):
            some = Noisy(*(field[part] for field in noisy))
            drop = torch.zeros(len(part), dtype=torch.bool, device=device)
            found = flexible_loss(
                run.average, some, x0[part], e[part], drop, config=c, count=int(some.masked.sum())
            )
            sums += torch.stack(found[:2])
    totals = torch.stack((noisy.masked.sum(), noisy.exists.sum()))
    token_loss, gap_loss = (sums / totals).tolist()
    return {"token_loss": token_loss, "gap_loss": gap_loss}


@dataclass(frozen=True)
class Pace:
    """How far insertion is ahead of revealing.

    With a `lead` of 1 all that is expected is inserted in the first pass; with 0 each pass inserts what
    the next one reveals.
    """

    lead: float
    hold: bool = True  # to the length that the first pass expects; else to what each pass expects

    def present(self, progress: float) -> float:
        """Share of the text that should be there when that much of the passes is over."""
        return min(1.0, self.lead + progress)


# The first two did best on toys, all but equal; the third grows as the paper does.
PACES = {"c": Pace(1.0), "grow": Pace(0.7, hold=False), "slow": Pace(0.25, hold=False)}


@torch.inference_mode()
def decode(model: Any, e: Tensor, *, steps: int, pace: Pace) -> Tensor:
    """Grow texts from nothing in so many passes: ids (B, T+1), start token first, padded."""
    config = model.config
    ids = torch.full((len(e), config.max_tokens + 1), config.pad_id, device=e.device)
    ids[:, 0] = config.end_id
    for k in range(steps):
        h = model.hidden(ids, e)
        exists = ids != config.pad_id
        here = exists.sum(1) - 1
        missing = model.missing(h) * exists
        if k == 0 or not pace.hold:
            length = (here + missing.sum(1)).clamp_max(config.max_tokens)
        if k:  # in the first pass there is nothing to reveal
            # So many that the clean ones keep pace, at least one; all of them in the last pass.
            clean = here - (ids == config.mask_id).sum(1)
            goal = torch.ceil(length * (k / (steps - 1)) - 1e-4) - clean
            last = torch.full_like(goal, config.max_tokens)
            ids = reveal(model, ids, h, goal.clamp_min(1) if k < steps - 1 else last)
        if k < steps - 1:
            goal = torch.floor(length * pace.present((k + 1) / (steps - 1)) + 0.5)
            ids = insert(ids, share_out(missing, (goal - here).clamp_min(0)), config)
    return ids


def reveal(model: Any, ids: Tensor, h: Tensor, count: Tensor) -> Tensor:
    """Put the most likely tokens at the `count` (B,) masks where they are surest."""
    masked = ids == model.config.mask_id
    sure, tokens = model.head(h[masked]).float().softmax(-1).max(-1)
    score = torch.full(ids.shape, -1.0, device=ids.device).masked_scatter(masked, sure)
    chosen = masked & first_of(score.argsort(dim=1, descending=True, stable=True), count[:, None])
    return torch.where(chosen, ids.masked_scatter(masked, tokens), ids)


def share_out(weights: Tensor, count: Tensor) -> Tensor:
    """Split whole numbers `count` (B,) over the places of weights (B, T) by the largest remainder."""
    parts = weights / weights.sum(1, keepdim=True).clamp_min(1e-6) * count[:, None]
    whole = parts.floor()
    left = count - whole.sum(1)
    more = first_of((parts - whole).argsort(dim=1, descending=True, stable=True), left[:, None])
    return (whole + more).long()


def insert(ids: Tensor, counts: Tensor, config: ModelConfig) -> Tensor:
    """Put `counts` (B, T) masks behind each place of ids (B, T); what does not fit is left out."""
    B, T = ids.shape
    exists = ids != config.pad_id
    counts = counts * exists
    room = T - exists.sum(1, keepdim=True)
    counts = counts - (counts.cumsum(1) - room).clamp_min(0).minimum(counts)
    place = torch.arange(T, device=ids.device) + counts.cumsum(1) - counts
    end = (exists.sum(1) + counts.sum(1))[:, None]
    masks = torch.where(torch.arange(T + 1, device=ids.device) < end, config.mask_id, config.pad_id)
    return masks.scatter(1, torch.where(exists, place, T), ids)[:, :T]


def by(run: Run, *, steps: int, pace: Pace) -> Invert:
    """Make the way to decode that `measure_sets` asks for."""
    config = run.config.model

    def invert(vectors: np.ndarray) -> list[list[int]]:
        found: list[list[int]] = []
        for part in torch.from_numpy(vectors).to(run.group.device).split(512):
            with run.half():
                rows = decode(run.average, part, steps=steps, pace=pace)
            found += [[i for i in row[1:] if i != config.pad_id] for row in rows.tolist()]
        return found

    return invert


def main() -> None:
    """Train the flexible variant for the given minutes and print its figures."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--process", choices=list(PROCESSES), default="mixed")
    args = parser.parse_intermixed_args()
    # It learns to insert, not to guess vectors.
    args.fields = ["embeds=False", "embed_share=0.0", *args.fields]
    config, data, fields = settings(args)
    run = Run(config, group=alone(), network=FlexibleDenoiser)
    pairs = open_pairs(config, data, run.group)
    loss_function = torch.compile(flexible_loss) if config.train.compile else flexible_loss

    def step() -> Tensor:
        return flexible_step(run, pairs, loss_function, process=args.process)

    warm_up(run, step)
    with turn(args.lock):
        train_on_time(run, step)
        figures = validate(run, pairs.validation(), process=args.process)
        encoder = load_encoder(config.encoder, device=str(run.group.device))
        modes = {
            f"{mode}{steps}": by(run, steps=steps, pace=pace)
            for mode, pace in PACES.items()
            for steps in (8, 32)
        }
        plain = plain_modes(Inverter(run.average, config=config, tokenizer=data.tokenizer))
        modes |= {mode: plain[mode] for mode in ("causal", "beam") if mode in plain}
        sets = measure_sets(args.texts, modes, limit=args.limit, data=data, encoder=encoder)
    print_line(args, {"process": args.process, **fields}, run, figures=figures, sets=sets)


if __name__ == "__main__":
    main()

"""One step of training: its texts, the noise on them, the loss, and the weights moved by it.

Every random draw is a function of (seed, step), so a run that is killed and resumed ends in the same bits,
and processes agree on a batch without a word. It must not know of the steps before, nor of when a run is
measured, saved or over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unembed.config import Config
from unembed.diffusion import (
    capacity,
    causal_rows,
    chosen_places,
    draw_masks,
    embedded_rows,
    sample_t,
    token_weights,
    weight_total,
)
from unembed.pairs import Batch, FreshSpans, Pairs, step_generator
from unembed.practice import TRIES, advantages, gains, practice_loss, write
from unembed.rewording import compiled, reword
from unembed.run import Run

_REWORDING = 10_000  # streams of draws from here on, one a process, are those of rewording
_PRACTICE = 20_000  # and from here on of practice


def masked_loss(
    model: nn.Module,
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
    whole: Tensor | None = None,
) -> Tensor:
    """Weighted sum of the cross entropy at the masked places; logits are computed only there.

    In `causal` rows (B,) what counts as masked is predicted from the left, and given to what is on its right
    but for what is `hidden` (B, T). In `whole` rows (B,) nothing is masked: there the text's vector, which is
    not told, is to be guessed.
    """
    unseen = masked
    if causal is not None:
        unseen = torch.where(causal[:, None], False if hidden is None else hidden, masked)
    xt = x0.masked_fill(unseen, config.model.mask_id)
    kinds = {"causal": causal, "whole": whole}
    more = {kind: rows for kind, rows in kinds.items() if rows is not None}
    h = model.hidden(xt, e, t=t, drop=drop, **more)  # type: ignore[operator]
    places = chosen_places(masked, count)
    logits = model.head(h.flatten(0, 1)[places])  # type: ignore[operator]
    entropy = F.cross_entropy(logits.float(), x0.flatten()[places], reduction="none")
    loss = (entropy * token_weights(masked, t, config.diffusion).flatten()[places]).sum()
    if config.train.bag_weight:
        log_p = F.log_softmax(model.bag(e).float(), dim=-1).gather(1, x0)  # type: ignore[operator]
        # Weighed as one more masked token for each token of the text.
        loss = loss - config.train.bag_weight * (log_p * (x0 != config.model.pad_id)).sum()
    if whole is not None:
        cosine = (model.vectors(h, x0) * F.normalize(e.float(), dim=-1)).sum(1)  # type: ignore[operator]
        # The distance: unlike 1 - cosine it does not fade as the guesses get better. All texts weigh as full
        # ones do: a word makes most of a difference to short texts, and those are guessed worst.
        apart = (2 - 2 * cosine + 1e-6).sqrt().masked_fill(~whole, 0.0).sum()
        loss = loss + config.train.embed_weight * config.model.max_tokens * apart
    return loss


def train_step(run: Run, pairs: Pairs, loss_function: Callable[..., Tensor]) -> Tensor:
    """Take one optimisation step; return the loss over this process's rows."""
    c, group = run.config, run.group
    if c.model.dropout:  # drawn by torch's own generator, which must not know of the steps before
        torch.manual_seed(step_generator(c.train.seed, run.step, stream=4 + group.rank).initial_seed())
    rows = group.rows(c.train.batch_size)
    x0, e = step_batch(run, pairs, rows)
    noise = draw_noise(run, x0, rows)
    total = group.total(weight_total(noise.masked, c.diffusion))
    count = most_targets(run, pairs, noise.masked)
    with run.half():
        loss = loss_function(
            run.model, x0, e, noise.t, noise.masked, noise.drop, config=c, count=count, **noise.kinds
        )
        loss = loss / total
    loss.backward()
    if c.train.practice_share:
        practise(run, pairs, x0, e)
    run.apply_gradients()
    return loss.detach()


def practise(run: Run, pairs: Pairs, x0: Tensor, e: Tensor) -> None:
    """Let the model write texts of its own for some rows, and add the gradient that the better ones have."""
    c, group = run.config, run.group
    some = slice(math.ceil(c.train.practice_share * len(x0)))
    truth, e = x0[some], e[some]
    stream = _PRACTICE + group.rank
    generator = step_generator(c.train.seed, run.step, stream=stream, device=group.device)
    with run.half():
        ids = write(run.model, e, generator=generator, compile=c.train.compile)
    worth = advantages(gains(ids, truth, c.model)).flatten(0, 1)
    ids = ids.flatten(0, 1)
    wanted = ids != c.model.pad_id
    if group.device.type == "cpu" and not c.train.compile:
        count = int(wanted.sum())
    else:  # a bound that is hardly ever met, as above; texts of its own may be a little longer
        count = min(wanted.numel(), _round_up(int(pairs.most_tokens(len(ids)) * 1.05)))
    function = compiled(practice_loss) if c.train.compile else practice_loss
    with run.half():
        loss = function(
            run.model, ids, e.repeat_interleave(TRIES, 0), worth * wanted, chosen_places(wanted, count)
        )
    (c.train.practice_weight * loss / group.total(wanted.sum())).backward()


@dataclass(frozen=True)
class Noise:
    """What a step does to its texts."""

    t: Tensor  # (B,)
    masked: Tensor  # (B, T), the targets: in rows read left to right all of the text, in whole rows nothing
    drop: Tensor  # (B,), rows that are not told their vector
    kinds: dict[str, Tensor]  # which rows are read in another way, as `masked_loss` takes them


def draw_noise(run: Run, x0: Tensor, rows: slice) -> Noise:
    """Draw this step's noise for a whole batch, and cut it to these rows, whose texts are x0 (B, T)."""
    c, device = run.config, run.group.device
    B, T = c.train.batch_size, c.model.max_tokens
    generator = step_generator(c.train.seed, run.step, device=device)
    t = sample_t(B, c.diffusion, generator=generator)
    masked = draw_masks(t, T, c.diffusion, generator=generator)[rows]
    drop = torch.rand(B, generator=generator, device=device) < c.diffusion.condition_dropout
    t, kinds = t[rows], {}
    if c.diffusion.embed_share:
        whole = embedded_rows(B, c.diffusion, device=device)[rows]
        t, masked = torch.where(whole, 0.0, t), masked & ~whole[:, None]
        kinds = {"whole": whole}
    if c.diffusion.causal_share:
        causal = causal_rows(B, c.diffusion, device=device)[rows]
        t = torch.where(causal, 1.0, t)
        masked = torch.where(causal[:, None], x0 != c.model.pad_id, masked)
        hidden = torch.rand((B, T), generator=generator, device=device) < c.diffusion.causal_hidden
        kinds |= {"causal": causal, "hidden": hidden[rows]}
    return Noise(t, masked, drop[rows], kinds)


def most_targets(run: Run, pairs: Pairs, masked: Tensor) -> int:
    """Bound the targets of a step, so that logits have one shape; exact where no device is waited for."""
    c, group = run.config, run.group
    B, T = masked.shape
    if group.device.type == "cpu" and not c.train.compile:
        return int(masked.sum())  # not a logit too many
    if group.world > 1:  # a share of a stratified batch is not stratified itself
        return B * T
    if not c.diffusion.causal_share:
        return capacity(B, T, c.diffusion)
    read = int(B * c.diffusion.causal_share)
    masks = B - read - int(B * c.diffusion.embed_share)
    count = capacity(masks, T, c.diffusion) + pairs.most_tokens(read)
    return min(B * T, _round_up(count))


def _round_up(count: int) -> int:
    """Round a bound up: products like round numbers, and are compiled for them once."""
    return -(-count // 512) * 512


def step_batch(run: Run, pairs: Pairs, rows: slice) -> Batch:
    """This step's texts and vectors; some words of fresh spans are written anew first, if that is set."""
    c, group = run.config.train, run.group
    if not c.reword_share or not isinstance(pairs, FreshSpans):  # cached vectors are there already
        return pairs.batch(run.step, rows)
    generator = step_generator(c.seed, run.step, stream=_REWORDING + group.rank, device=group.device)

    def change(ids: Tensor) -> Tensor:
        with run.half():
            return reword(
                run.model,
                ids,
                share=c.reword_share,
                opens=pairs.opens,
                generator=generator,
                compile=c.compile,
            )

    return pairs.batch(run.step, rows, change)

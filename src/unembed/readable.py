"""What a model wrote, made readable: drafts and standings of a search -> texts, steps, rounds.

Pure functions of a tokenizer, a model's settings and tensors. Knows what decoding and the search leave
behind; must not know the model, the encoder, or how either was run.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from unembed.config import ModelConfig
from unembed.decode import Draft
from unembed.moves import MOVES
from unembed.results import Inversion, MoveCount, Round, Step
from unembed.search import Standing
from unembed.tokens import TextTokenizer


def read_draft(
    draft: Draft, *, strategy: str, tokenizer: TextTokenizer, config: ModelConfig
) -> list[Inversion]:
    """Make the rows of a finished draft readable."""
    rows = draft.ids.cpu().numpy()
    lengths = content_lengths(rows, end_id=config.end_id)
    return [
        Inversion(
            text=text,
            ids=ids[:length].tolist(),
            confidences=confidence[:length].tolist(),
            strategy=strategy,
            forward_passes=int(passes),
            likeness=_likeness(likeness),
        )
        for text, ids, confidence, passes, likeness, length in zip(
            tokenizer.decode(rows),
            rows,
            draft.confidence.cpu().numpy().round(6),
            draft.passes.cpu(),
            draft.likeness.tolist(),
            lengths,
            strict=True,
        )
    ]


def read_step(draft: Draft, *, index: int, total: int, tokenizer: TextTokenizer, config: ModelConfig) -> Step:
    """Make the only row of a draft readable."""
    row = draft.ids[0].cpu().numpy()
    length = int(content_lengths(row[None], end_id=config.end_id)[0])
    masked = row[:length] == config.mask_id
    pieces = tokenizer.pieces(row[:length])
    return Step(
        index=index,
        total=total,
        ids=row[:length].tolist(),
        pieces=["_" if hidden else piece for piece, hidden in zip(pieces, masked, strict=True)],
        confidences=draft.confidence[0, :length].cpu().numpy().round(6).tolist(),
        text=tokenizer.decode(row[:length][~masked][None])[0],
        likeness=_likeness(float(draft.likeness[0])),
    )


def read_standing(
    standing: Standing,
    *,
    strategy: str,
    ranked_by: str,
    known: bool,
    tokenizer: TextTokenizer,
    config: ModelConfig,
) -> list[Inversion]:
    """Make the best text of each row of a finished search readable.

    Args:
        standing: Where the search ended.
        strategy: How its drafts were decoded.
        ranked_by: The name of the encoder that was asked.
        known: Whether that was the encoder itself: a guess of it cannot tell that a text is the very one.
        tokenizer: What turns ids into text.
        config: The model's settings.
    """
    # Where every candidate was blank, so is the answer.
    ids = standing.ids[:, 0].masked_fill(~standing.cosine[:, :1].isfinite(), config.end_id)
    # A search has the cosine of what it found, and of that the model makes no guess.
    no_guess = torch.full_like(standing.cosine[:, 0], torch.nan)
    best = Draft(ids, standing.confidence[:, 0], standing.passes, no_guess)
    return [
        replace(
            inversion,
            cosine=_cosine(cosine),
            encoder_calls=int(calls),
            exact=bool(exact) if known else None,
            ranked_by=ranked_by,
        )
        for inversion, cosine, calls, exact in zip(
            read_draft(best, strategy=strategy, tokenizer=tokenizer, config=config),
            standing.cosine[:, 0].tolist(),
            standing.calls.tolist(),
            standing.exact.tolist(),
            strict=True,
        )
    ]


def read_round(standing: Standing, *, index: int, total: int, known: bool, tokenizer: TextTokenizer) -> Round:
    """Make the standing of the only text readable; `known` as in `read_standing`."""
    texts = tokenizer.decode(standing.ids[0].cpu().numpy())
    full = int(standing.cosine[0].isfinite().sum())
    counts = zip(standing.tries[0], standing.entered[0], standing.improved[0], strict=True)
    return Round(
        index=index,
        total=total,
        text=texts[0],
        cosine=_cosine(float(standing.cosine[0, 0])),
        encoder_calls=int(standing.calls[0]),
        pool=list(zip(texts[:full], map(_cosine, standing.cosine[0].tolist()), strict=False)),
        moves={name: MoveCount(*map(int, each)) for name, each in zip(MOVES, counts, strict=True)},
        exact=known and bool(standing.exact[0]),
    )


def content_lengths(rows: np.ndarray, *, end_id: int) -> np.ndarray:
    """Tokens before the first end in each row; all of them where there is none."""
    ends = rows == end_id
    return np.where(ends.any(1), ends.argmax(1), rows.shape[1])


def _cosine(value: float) -> float:
    """Round a cosine to what float32 is sure of; 0 where no draft held a word."""
    return round(value, 6) if np.isfinite(value) else 0.0


def _likeness(value: float) -> float | None:
    """Round a guess of a cosine likewise; None where there is none."""
    return None if np.isnan(value) else round(value, 6)

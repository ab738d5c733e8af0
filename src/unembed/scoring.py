"""Originals and what came back of them -> rows of figures, whichever way it came about.

Knows token ids, texts, vectors and the metrics. Must not know models, strategies or suites' files.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from unembed import metrics, personal
from unembed.errors import UnembedError
from unembed.records import Row
from unembed.suites import Sample
from unembed.vectors import similarity

if TYPE_CHECKING:
    from unembed.encoders import Encoder
    from unembed.tokens import TextTokenizer


@dataclass(frozen=True)
class References:
    """Texts as an inverter could at best return them, and the vectors it is given."""

    ids: list[np.ndarray]  # content tokens of each text
    texts: list[str]  # read back from the ids, so that an uncased vocabulary is not punished for case
    vectors: np.ndarray  # (N, E), of the texts as cut


@dataclass(frozen=True)
class Hypotheses:
    """What was recovered, and at which cost."""

    ids: list[np.ndarray]  # content tokens of each text
    texts: list[str]
    seconds: float
    forward_passes: Sequence[int] = ()  # of each text; none by default
    encoder_calls: Sequence[int] = ()
    believed_exact: Sequence[bool | None] = ()
    likeness: Sequence[float | None] = ()


@dataclass(frozen=True)
class Cut:
    """Texts cut to a number of tokens."""

    given: list[str]  # as they are embedded, with their case
    ids: list[np.ndarray]
    texts: list[str]  # read back from the ids


def cut(texts: Iterable[str], *, tokenizer: TextTokenizer, max_tokens: int) -> Cut:
    """Cut texts to `max_tokens`, with a warning."""
    if isinstance(texts, str):
        raise UnembedError("expected a list of texts, not one string; put it in brackets.")
    texts = list(texts)
    if not texts:
        raise UnembedError("there is no text to evaluate; give at least one.")
    encoded = tokenizer.encode(texts, max_tokens=max_tokens)
    if encoded.truncated.any():
        warnings.warn(
            f"{int(encoded.truncated.sum())} of {len(texts)} texts are longer than {max_tokens} tokens "
            "and were cut.",
            stacklevel=3,
        )
    ids = [row[:length] for row, length in zip(encoded.ids, encoded.lengths, strict=True)]
    return Cut(encoded.texts, ids, tokenizer.decode(encoded.ids))


def refer(
    texts: Iterable[str],
    *,
    tokenizer: TextTokenizer,
    encoder: Encoder,
    max_tokens: int,
    batch_size: int = 64,
    show_progress: bool = False,
) -> References:
    """Cut texts to `max_tokens`, with a warning, and embed them as cut."""
    held = cut(texts, tokenizer=tokenizer, max_tokens=max_tokens)
    vectors = encoder.encode(held.given, batch_size=batch_size, show_progress_bar=show_progress)
    return References(held.ids, held.texts, vectors)


def measure(
    references: References,
    hypotheses: Hypotheses,
    *,
    encoder: Encoder,
    samples: Sequence[Sample] = (),
    given: Sequence[str] = (),
    items: Sequence[Sequence[personal.Item]] = (),
    unknown: int | None = None,
    method: str = "",
    suite: str = "texts",
    first: int = 0,
) -> list[Row]:
    """Measure each hypothesis against its reference, whichever way it came about.

    `unknown` is the id that stands for whatever a vocabulary cannot write. It is never counted as
    recovered: two unknown words are not the same word.
    """
    count = len(references.texts)
    samples = samples or [Sample(text) for text in references.texts]
    given = given or references.texts
    items = items or [()] * count
    passes, calls = hypotheses.forward_passes or [0] * count, hypotheses.encoder_calls or [0] * count
    exact, likeness = hypotheses.believed_exact or [None] * count, hypotheses.likeness or [None] * count
    cosines = similarity(encoder, references.vectors, hypotheses.texts)
    rows = []
    for i in range(count):
        ids, found = references.ids[i], hypotheses.ids[i]
        blind = 0
        if unknown is not None:
            blind = int((ids == unknown).sum())
            found = np.where(found == unknown, -1, found)  # an id that no reference has
        reference, recovered = references.texts[i], hypotheses.texts[i]
        rows.append(
            Row(
                method=method,
                suite=suite,
                number=first + i,
                language=samples[i].language,
                key=samples[i].key,
                text=given[i],
                reference=reference,
                recovered=recovered,
                tokens=len(ids),
                unknown=blind,
                token_accuracy=round(metrics.token_accuracy(ids, found), 6),
                token_f1=round(metrics.token_f1(ids, found), 6),
                exact_match=0.0 if blind else metrics.exact_match(reference, recovered),
                rouge_l=round(metrics.rouge_l(reference, recovered), 6),
                cosine=round(float(cosines[i]), 6),
                forward_passes=int(passes[i]),
                encoder_calls=int(calls[i]),
                seconds=round(hypotheses.seconds / count, 6),
                believed_exact=exact[i],
                likeness=likeness[i],
                personal=[
                    {
                        "kind": item.kind,
                        "text": item.text,
                        "recovered": personal.survives(item.text, recovered),
                    }
                    for item in items[i]
                ],
            )
        )
    return rows


def unknown_id(tokenizer: TextTokenizer) -> int | None:
    """The id that stands for whatever a vocabulary cannot write; None where it can write anything."""
    model = json.loads(tokenizer.to_json())["model"]
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    vocabulary = model.get("vocab")
    return vocabulary.get(model.get("unk_token")) if isinstance(vocabulary, dict) else None

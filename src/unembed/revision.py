"""Texts written anew: told a draft of each, and what the draft's vector misses of the one that is asked for.

What it misses the model guesses, so that no encoder is asked. Each round the best of the texts that are there
are revised, and what comes of them is put beside them. Knows tensors only, no text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unembed.candidates import Candidates
from unembed.choice import judge, recognise
from unembed.shortlist import Shortlist, shortlists
from unembed.trunk import Trunk, is_gpu
from unembed.writer import Writer

REVISIONS, MOST_REVISIONS = 4, 64
# How many texts are revised in a round, and how many beginnings of what comes of each are kept.
PARENTS, BEAMS = 4, 4
_POOL = 64  # texts that are chosen between


def revised_rows(revisions: int) -> int:
    """How many rows a text takes while it is revised.

    >>> revised_rows(4), revised_rows(0)
    (16, 0)
    """
    return PARENTS * BEAMS * (revisions > 0)


def revise(model: Any, e: Tensor, found: Candidates, *, rounds: int) -> Candidates:
    """Revise the best of some texts, as they are judged, round after round; return all that are still good.

    Their scores are those of likelihood, and so are the scores of what is returned.
    """
    lists = None if is_gpu(e) else shortlists(model, e, blind=False)
    done: Tensor | None = None  # texts that were revised: they would become the same once more
    for _ in range(rounds):
        judged, _ = judge(model, e, found.ids, found.score, blind=False, likeness=found.likeness)
        order = judged.sort(dim=1, descending=True, stable=True).indices
        found, judged = found.take(order[:, :_POOL]), judged.gather(1, order[:, :_POOL])
        if done is not None:
            known = (found.ids[:, :, None] == done[:, None]).all(3).any(2)
            judged = judged.masked_fill(known, -torch.inf)
        parents = found.take(judged.topk(min(PARENTS, judged.shape[1]), dim=1).indices)
        done = parents.ids if done is None else torch.cat((done, parents.ids), 1)
        more = write_anew(model, e, parents.ids, lists=lists)
        found = found.beside(more).once()
    return found


def write_anew(model: Any, e: Tensor, drafts: Tensor, *, lists: list[Shortlist] | None) -> Candidates:
    """Write P texts of each vector e (B, E) anew from drafts (B, P, T), in several ways each."""
    B, P, _ = drafts.shape
    trunk = Trunk.revising(model, e.repeat_interleave(P, dim=0), drafts.flatten(0, 1))
    writer = Writer.by(trunk, each=BEAMS, lists=lists)
    for place in range(model.config.max_tokens):
        if len(writer.rows):
            writer = writer.step(place)
    texts = writer.now.regrouped(B)
    likeness = recognise(model, e, texts.ids)
    written = Candidates.of(texts, likeness)
    passes = texts.passes + P + texts.ids.shape[1]  # each draft is read once, and each text
    return Candidates(written.ids, written.confidence, written.score, passes, written.likeness)

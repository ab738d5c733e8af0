"""The moves of the closed loop, each a small pure function from texts to plans of new texts.

A plan says of every place of the new row which place it copies, or that it is masked. Shifts, swaps
and crossings are then arithmetic on places, and tokens and confidences follow the same plan. Moves
must not know of models, encoders or loops: `search` picks them, fills the masks and ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unembed.config import ModelConfig
from unembed.errors import unknown_name

KNOBS = 4  # uniforms a move may use for choices that concern the whole row
MOST_MASKED = 0.4  # share of a text that a move may mask again
LONGEST_SPAN, LONGEST_SHIFT, LONGEST_RESIZED = 7, 2, 4


@dataclass(frozen=True)
class Parents:
    """What moves work on: N complete rows, another text of each one's pool, and draws."""

    ids: Tensor  # (N, T)
    confidence: Tensor  # (N, T)
    lengths: Tensor  # (N, 1), tokens of content, at least 1
    mates: Tensor  # (N, T) ids
    mate_confidence: Tensor  # (N, T)
    mate_lengths: Tensor  # (N, 1)
    uniforms: Tensor  # (N, T), one a place
    knobs: Tensor  # (N, KNOBS), for choices of the whole row

    def take(self, rows: Tensor) -> Parents:
        """Return some of the rows."""
        return Parents(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    @property
    def places(self) -> Tensor:
        """0 to T - 1, (1, T)."""
        return torch.arange(self.ids.shape[1], device=self.ids.device)[None]

    @property
    def mask(self) -> int:
        """What stands in a plan for a mask: own places go from 0, the mate's from T."""
        return 2 * self.ids.shape[1]

    @property
    def nothing(self) -> int:
        """What stands in a plan for padding."""
        return 2 * self.ids.shape[1] + 1

    def choose(self, knob: int, count: Tensor | int) -> Tensor:
        """Choose a whole number from 0 to `count` - 1 for each row, (N, 1), by one of its knobs."""
        return (self.knobs[:, knob, None] * count).long()

    def masking(self, where: Tensor) -> Tensor:
        """Plan to mask some of the content and keep the rest."""
        return torch.where(where & (self.places < self.lengths), self.mask, self.places)


@dataclass(frozen=True)
class Move:
    """One way to change a text.

    Attributes:
        name: Its name everywhere: Python, statistics, plots.
        summary: One line for people.
        plan: (parents) -> what each place of the new rows copies, (N, T).
        renews: Whether what it masks must not come back as it was.
        causal: Whether what it masks is to be written from left to right.
    """

    name: str
    summary: str
    plan: Callable[[Parents], Tensor]
    renews: bool = False
    causal: bool = False


@dataclass(frozen=True)
class Moved:
    """Rows after a move, in form but with masks."""

    ids: Tensor  # (N, T)
    confidence: Tensor  # (N, T), 0 where masked
    avoid: Tensor  # (N, T), the token that must not come to a place; the mask where any may


def plan_subset(parents: Parents) -> Tensor:
    """Mask a random subset."""
    return parents.masking(_lowest(parents.uniforms, parents))


def plan_unsure(parents: Parents) -> Tensor:
    """Mask where the model was unsure; the draws break the habit of masking the same places again."""
    return parents.masking(_lowest(parents.confidence + 0.3 * parents.uniforms, parents))


def plan_span(parents: Parents) -> Tensor:
    """Mask a few neighbours."""
    width = 1 + parents.choose(0, parents.lengths.clamp(max=LONGEST_SPAN))
    start = parents.choose(1, parents.lengths - width + 1)
    return parents.masking((parents.places >= start) & (parents.places < start + width))


def plan_replace(parents: Parents) -> Tensor:
    """Mask one token."""
    return parents.masking(parents.places == parents.choose(0, parents.lengths))


def plan_insert(parents: Parents) -> Tensor:
    """Open a gap of masks; what is pushed over the end of the row is lost."""
    width = 1 + parents.choose(0, LONGEST_SHIFT)
    start = parents.choose(1, parents.lengths + 1)
    plan = torch.where(parents.places < start, parents.places, parents.places - width)
    return torch.where((parents.places >= start) & (parents.places < start + width), parents.mask, plan)


def plan_delete(parents: Parents) -> Tensor:
    """Close the gap left by a few tokens; a text that filled its row may go on behind its old end."""
    width = (1 + parents.choose(0, LONGEST_SHIFT)).minimum(parents.lengths - 1)
    start = parents.choose(1, parents.lengths - width + 1)
    return _shift_left(parents, start, width)


def plan_exchange(parents: Parents) -> Tensor:
    """Delete a few tokens here and open a gap there: what stands between moves by a place or two."""
    n, width = parents.lengths, 1 + parents.choose(0, LONGEST_SHIFT)
    width = width.minimum(n)
    gone, gap = parents.choose(1, n - width + 1), parents.choose(2, n - width + 1)
    # Without the deleted tokens, then with the gap: the second shift looks up places in the first.
    place = parents.places - torch.where(parents.places < gap, 0, width)
    plan = torch.where(place < gone, place, place + width)
    plan = torch.where((parents.places >= gap) & (parents.places < gap + width), parents.mask, plan)
    return torch.where(parents.places < n, plan, parents.places)


def plan_resize(parents: Parents) -> Tensor:
    """Mask a few neighbours again, in one or two places more or less."""
    T, old = parents.ids.shape[1], 1 + parents.choose(0, parents.lengths.clamp(max=LONGEST_RESIZED))
    start = parents.choose(1, parents.lengths - old + 1)
    change = parents.choose(2, 2 * LONGEST_SHIFT) - LONGEST_SHIFT
    change = torch.where(change < 0, change, change + 1)  # never 0
    new = torch.where(old + change > 0, old + change, old - change)
    plan = torch.where(parents.places < start, parents.places, parents.places - new + old)
    plan = torch.where(plan < T, plan, torch.where(parents.lengths < T, parents.nothing, parents.mask))
    return torch.where((parents.places >= start) & (parents.places < start + new), parents.mask, plan)


def plan_redraft(parents: Parents) -> Tensor:
    """Mask most of the text, and let what is kept guide a new draft."""
    share = MOST_MASKED + (0.95 - MOST_MASKED) * parents.knobs[:, :1]
    return parents.masking(parents.uniforms < share)


def plan_differ(parents: Parents) -> Tensor:
    """Mask most of the places where another text of the pool has another token."""
    share = 0.4 + 0.6 * parents.knobs[:, :1]
    return parents.masking((parents.ids != parents.mates) & (parents.uniforms < share))


def plan_swap(parents: Parents) -> Tensor:
    """Swap two neighbouring chunks of any length, so that a chunk may move to any place.

    Short chunks are more likely (log-uniform), since single words go astray more often than clauses.
    """
    n = parents.lengths
    left = _log_uniform(parents, 0, n - 1)
    right = _log_uniform(parents, 1, n - left).minimum(n - left)
    start = parents.choose(2, n - left - right + 1)
    place = parents.places - start
    plan = torch.where(place < right, parents.places + left, parents.places - right)
    return torch.where((place >= 0) & (place < left + right), plan, parents.places)


def plan_cross(parents: Parents) -> Tensor:
    """Go on in another text of the pool, which may stand a place or two further left or right."""
    T = parents.ids.shape[1]
    cut = parents.choose(0, parents.lengths + 1)
    shift = parents.choose(1, 2 * LONGEST_SHIFT + 1) - LONGEST_SHIFT
    there = (cut + shift).clamp(min=0).minimum(parents.mate_lengths)
    other = parents.places - cut + there
    plan = torch.where(other < T, T + other, parents.nothing)
    return torch.where(parents.places < cut, parents.places, plan)


def plan_tail(parents: Parents) -> Tensor:
    """Mask the last few tokens and some room behind them, so that the model ends the text anew."""
    n = parents.lengths
    start = n - parents.choose(0, n.clamp(max=LONGEST_SPAN) + 1)
    stop = n + 1 + parents.choose(1, LONGEST_SHIFT + 1)
    plan = torch.where(parents.places < stop, parents.mask, parents.nothing)
    return torch.where(parents.places < start, parents.places, plan)


def plan_rewrite(parents: Parents) -> Tensor:
    """Keep the beginning and mask all the room behind it, so that the model writes on from there."""
    return torch.where(parents.places < parents.choose(0, parents.lengths), parents.places, parents.mask)


def _lowest(score: Tensor, parents: Parents) -> Tensor:
    """Mark the places of lowest score, up to the share of the content that may be masked."""
    most = (parents.lengths * MOST_MASKED).long().clamp(min=1)
    count = 1 + parents.choose(0, most)
    outside = parents.places >= parents.lengths
    rank = score.masked_fill(outside, float("inf")).argsort(dim=1, stable=True).argsort(dim=1)
    return rank < count


def _log_uniform(parents: Parents, knob: int, most: Tensor) -> Tensor:
    """Choose a whole number from 1 to `most` for each row, each doubling as likely as the one before."""
    most = most.clamp(min=1)
    return (most + 1.0).pow(parents.knobs[:, knob, None]).long().clamp(min=1).minimum(most)


def _shift_left(parents: Parents, start: Tensor, width: Tensor) -> Tensor:
    """Plan a row without the `width` places from `start` on."""
    T = parents.ids.shape[1]
    plan = torch.where(parents.places < start, parents.places, parents.places + width)
    return torch.where(plan < T, plan, torch.where(parents.lengths < T, parents.nothing, parents.mask))


MOVES: dict[str, Move] = {
    move.name: move
    for move in (
        Move("subset", "mask a random subset again", plan_subset),
        Move("unsure", "mask again where the model was unsure", plan_unsure),
        Move("span", "mask neighbours again", plan_span),
        Move("replace", "put another token in the place of one", plan_replace, renews=True),
        Move("insert", "insert one or two masks", plan_insert),
        Move("delete", "delete one or two tokens", plan_delete),
        Move("exchange", "delete here, insert there", plan_exchange),
        Move("resize", "mask neighbours again, more or fewer of them", plan_resize),
        Move("redraft", "mask most of the text", plan_redraft),
        Move("differ", "mask where another text of the pool differs", plan_differ),
        Move("swap", "swap neighbouring chunks", plan_swap),
        Move("cross", "go on in another text of the pool", plan_cross),
        # Not the last: a choice that falls behind all shares by rounding takes the last.
        Move("rewrite", "keep the beginning, and write on from left to right", plan_rewrite, causal=True),
        Move("tail", "mask the end of the text, and some room", plan_tail),
    )
}


def find_move(name: str) -> Move:
    """Return the move of that name."""
    if name not in MOVES:
        raise unknown_name("move", name, MOVES)
    return MOVES[name]


def make(parents: Parents, chosen: Tensor, config: ModelConfig) -> Moved:
    """Make each row's chosen move, (N,) places in `MOVES`.

    A row that a move leaves as it was, or without a token, has one token replaced instead.
    """
    plan = parents.places.expand_as(parents.ids).clone()
    renews = torch.zeros_like(parents.lengths, dtype=torch.bool)
    for number, move in enumerate(MOVES.values()):
        rows = (chosen == number).nonzero().squeeze(1)
        if len(rows):
            plan[rows] = move.plan(parents.take(rows))
            renews[rows] = move.renews
    constants = torch.tensor([[config.mask_id, config.pad_id]], device=plan.device).expand(len(plan), -1)
    ids, order = settle(torch.cat((parents.ids, parents.mates, constants), 1).gather(1, plan), config)
    idle = (ids == parents.ids).all(1, keepdim=True) | (ids[:, :1] == config.end_id)
    ids = torch.where(idle, parents.ids, ids)
    plan = torch.where(idle, parents.places, plan.gather(1, order))
    masked = (ids == config.mask_id) | (idle & (parents.places == parents.choose(0, parents.lengths)))
    sure = torch.cat((parents.confidence, parents.mate_confidence, torch.zeros_like(constants)), 1)
    return Moved(
        ids=ids.masked_fill(masked, config.mask_id),
        confidence=sure.gather(1, plan).masked_fill(masked, 0.0),
        avoid=torch.where(masked & (renews | idle), parents.ids, config.mask_id),
    )


def settle(ids: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Bring rows into form: content, one end if there is room, padding; and where each place came from.

    What follows the first end is dropped, and so is padding in front of it. Masks are content.
    """
    content = ((ids == config.end_id).cumsum(1) == 0) & (ids != config.pad_id)
    order = (~content).int().argsort(dim=1, stable=True)
    length = content.sum(1, keepdim=True)
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    ids = ids.gather(1, order).masked_fill(places > length, config.pad_id)
    return ids.masked_fill(places == length, config.end_id), order


def row_lengths(ids: Tensor, config: ModelConfig) -> Tensor:
    """Tokens of content in settled rows, (N, 1)."""
    return ((ids == config.end_id).cumsum(1) == 0).sum(1, keepdim=True)

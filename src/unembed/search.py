"""The closed loop: drafts, then rounds of moves, each candidate ranked by what its embedding says.

Knows the decoding loop, the moves, and how an encoder is asked. Must not know checkpoints, or what
becomes of the answer. A text's draws depend on the seed, its number and the round alone, and so does
its choice of moves, so the texts that share its batch do not change its answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain, cycle, groupby, islice, repeat
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from unembed.config import DiffusionConfig, ModelConfig
from unembed.decode import DecodeOptions, Draft, FittedOptions, Model, blank, decode
from unembed.drafts import token_likelihood
from unembed.draws import draw, stream_keys
from unembed.errors import UnembedError, unknown_name
from unembed.moves import KNOBS, MOVES, Parents, make, row_lengths, settle
from unembed.reader import ROWS, Reader
from unembed.spelling import NEVER, hash_weights
from unembed.trunk import Trunk

Refine = Literal["encoder", "self", "distilled"]

# Rounding a vector turns it by an angle of about its relative error d, and 1 - cosine is d^2 / 2: with
# MiniLM at most 3e-8 for vectors kept in half precision and 2e-6 in bfloat16, while float32 itself
# resolves 1e-7. The least that a change of one token did, of 1,574 tried, is 1.2e-4.
EXACT = 1 - 1e-5

# Who guesses vectors is wrong somewhere, and a search by such a cosine alone climbs to where it is wrong in
# the search's favour: texts that no one would write. So they are ranked by their log-likelihood a token as
# well, with this weight, which makes a likelier text of those that are about as near win.
LIKELIHOOD = {"self": 0.01, "distilled": 0.02}

# Drafts besides the one that was asked for: strategy, steps, temperature; of a model that reads left to
# right, and of one that does not. First come corrections, of the first kind, each for a vector that makes up
# for what the one before has missed: early on nothing finds more by so few calls. The rest is drawn, lest all
# be alike.
CAUSAL_DRAFTS = (("causal", 1, 0.0), ("causal", 1, 0.6), ("causal", 1, 0.6), ("confidence", 8, 1.0))
DRAFTS = (("confidence", 8, 0.0), ("confidence", 8, 1.0), ("confidence", 8, 1.0), ("euler", 8, 0.7))
CORRECTIONS = 4
GAIN = 0.5  # share of a miss that the next correction makes up for

# How far past the target moves aim: a share of them not at all, the others by at most so many times what
# their parent misses, and at most so far.
STRAIGHT, LARGEST, FURTHEST = 0.2, 1.5, 0.4

FILL = FittedOptions("confidence", 2, temperature=0.7)
WRITE = DecodeOptions("causal", 1, temperature=0.6)
MASKS_A_STEP = 6  # one step more than the two for so many masks

# Bounds of memory, whatever the number of candidates.
BLOCK = 2**16  # candidates of all texts that are made and ranked together
REMEMBERED = 2**16  # texts that are known to have been embedded, for each vector
# Weight of a move's past: after each round what was counted before counts for so much.
MEMORY = 0.9


@dataclass(frozen=True)
class SearchOptions:
    """How long and how widely to search; the same for every text."""

    refine: Refine = "encoder"  # by whose embedding candidates are ranked
    rounds: int = 20
    candidates: int = 32  # new texts a round
    pool: int = 8  # texts kept from round to round
    budget: int | None = None  # most encoder calls a text; None for no limit but the rounds'
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every value."""
        if self.refine not in get_args(Refine):
            raise unknown_name("refine", str(self.refine), get_args(Refine))
        for name in ("rounds", "candidates", "pool", "budget"):
            value = getattr(self, name)
            if value is None and name == "budget":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UnembedError(f"{name} must be a whole number of at least 1, not {value!r}.")


@dataclass(frozen=True)
class Standing:
    """Where every text stands after a round; a pool is sorted, the best first."""

    ids: Tensor  # (B, P, T)
    confidence: Tensor  # (B, P, T)
    vectors: Tensor  # (B, P, E), their embeddings, of length 1; where the pool has a free place, the target
    cosine: Tensor  # (B, P), -inf where the pool has a free place
    score: Tensor  # (B, P), what they are sorted by: the cosine, or more than that; -inf likewise
    calls: Tensor  # (B,), texts embedded so far
    passes: Tensor  # (B,), rows that went through the model so far
    tries: Tensor  # (B, M), in this round, by move: candidates embedded,
    entered: Tensor  # (B, M), those that came into the pool,
    improved: Tensor  # (B, M), those above the best text of the round before

    @property
    def exact(self) -> Tensor:
        """Whether the best text is believed to be the original, (B,)."""
        return self.cosine[:, 0] >= EXACT

    def take(self, rows: Tensor) -> Standing:
        """Return some of the texts."""
        return Standing(*(getattr(self, f.name)[rows] for f in fields(self)))

    def put(self, rows: Tensor, other: Standing) -> Standing:
        """Return a copy with some of the texts replaced; in this round the others made no move."""
        merged = {f.name: getattr(self, f.name).clone() for f in fields(self)}
        for name in ("tries", "entered", "improved"):
            merged[name].zero_()
        for name, value in merged.items():
            value[rows] = getattr(other, name)
        return Standing(**merged)


@dataclass(frozen=True)
class Searcher:
    """What a search needs besides its vectors."""

    model: Model
    reader: Reader
    diffusion: DiffusionConfig
    decoding: DecodeOptions = DecodeOptions()
    options: SearchOptions = SearchOptions()

    @property
    def config(self) -> ModelConfig:
        """The shape of rows."""
        return self.model.config

    @torch.inference_mode()
    def run(self, e: Tensor, *, first: int = 0) -> Iterator[Standing]:
        """Yield where the texts of vectors e (B, E) stand: after the drafts, then after each round.

        Texts that are exact, or have used their budget, leave the batch; the loop ends when none is
        left. `first` is the number of the first row among all that are searched with this seed.
        """
        B, options = len(e), self.options
        e = F.normalize(e.float(), dim=1)
        numbers = torch.arange(first, first + B, device=e.device)
        standing, seen = self._begin(e, numbers)
        past = torch.zeros((2, B, len(MOVES)), device=e.device)  # tries and rewards of each move
        yield standing
        for round_ in range(1, options.rounds + 1):
            active = self._unfinished(standing)
            if not len(active):
                return
            keys = stream_keys(options.seed, numbers[active], round_)
            now, known = self._round(e[active], standing.take(active), seen[active], past[:, active], keys)
            seen = _remember(seen, active, known)
            past *= MEMORY
            past[:, active] += torch.stack((now.tries, now.entered + now.improved)).float()
            standing = standing.put(active, now)
            yield standing

    def _unfinished(self, standing: Standing) -> Tensor:
        """Which texts are not exact and may cost another call."""
        left = ~standing.exact
        if self.options.budget is not None:
            left &= standing.calls < self.options.budget
        return left.nonzero().squeeze(1)

    def _round(
        self, e: Tensor, before: Standing, seen: Tensor, past: Tensor, keys: Tensor
    ) -> tuple[Standing, Tensor]:
        """Make a round's candidates from the pools as they stand, some at a time, and rank them."""
        A, C, T = len(e), self.options.candidates, self.config.max_tokens
        each = max(1, BLOCK // A)
        width = 3 + KNOBS + (1 + fill_steps(T)) * T  # parent, mate, aim, knobs, places, filling
        none = torch.zeros_like(before.tries)
        now = replace(before, tries=none, entered=none, improved=none)
        spread = draw(keys, 0, 1)
        for first in range(0, C, each):
            count = min(each, C - first)
            draws = draw(keys, 1 + first * width, count * width).view(A, count, width)
            chosen = choose_moves(past, spread, first=first, count=count, total=C, causal=self.config.causal)
            candidates = self._propose(e, before, chosen, draws)
            now, seen, _ = self._rank(e, now, seen, candidates, chosen)
        return now, seen

    def _begin(self, e: Tensor, numbers: Tensor) -> tuple[Standing, Tensor]:
        """Write and rank the first candidates: the draft that was asked for, corrections, and others."""
        asked, T = self.decoding.fit(self.config), self.config.max_tokens
        # The draws of the open loop, so that the first draft is the open loop's answer.
        first, stop = int(numbers[0]), int(numbers[-1]) + 1
        uniforms = asked.draw(first, stop, config=self.config, seed=self.options.seed)
        draft = _one_each(self._decode(e, uniforms.to(e.device), asked))
        seen = torch.full((len(e), 0), NEVER, device=e.device)
        standing, seen, vectors = self._rank(e, _nothing(e, self.options.pool, self.config), seen, draft)
        found, aim = _where_any(vectors[:, 0], e), e.clone()
        for part, kind in enumerate(other_drafts(self.options.pool - 1, causal=self.config.causal)):
            active = self._unfinished(standing)
            if not len(active):
                break
            corrects = part < CORRECTIONS
            if corrects:
                aim[active] += GAIN * (e - found)[active]
            strategy, steps, temperature = kind
            plan = replace(
                asked, strategy=strategy, steps=min(steps, T), temperature=temperature, drafts=1
            ).fit(self.config)
            keys = stream_keys(self.options.seed, numbers[active], -1 - part)
            uniforms = draw(keys, 0, plan.steps * 2 * T).view(-1, plan.steps, 2, T)
            draft = _one_each(self._decode((aim if corrects else e)[active], uniforms, plan))
            now, known, vectors = self._rank(e[active], standing.take(active), seen[active], draft)
            seen, standing = _remember(seen, active, known), standing.put(active, now)
            # A text that was there before most likely is the one just before.
            found[active] = _where_any(vectors[:, 0], found[active])
        return standing, seen

    def _propose(self, e: Tensor, standing: Standing, chosen: Tensor, draws: Tensor) -> Draft:
        """Make moves from pool members and fill the masks: (A, C, T) candidates."""
        A, C = chosen.shape
        T = self.config.max_tokens
        size = standing.cosine.isfinite().sum(1, keepdim=True).clamp(min=1)
        # Squared, so that better texts are the parents of more candidates.
        parent = (draws[..., 0].square() * size).long()
        mate = (parent + 1 + (draws[..., 1] * (size - 1)).long()) % size  # another one, if there is one
        text = torch.arange(A, device=e.device)[:, None]
        ids, mates = standing.ids[text, parent].flatten(0, 1), standing.ids[text, mate].flatten(0, 1)
        flat = draws[..., 3:].flatten(0, 1)
        steps = fill_steps(T)
        knobs, places, fill = flat.split((KNOBS, T, steps * T), dim=1)
        parents = Parents(
            ids=ids,
            confidence=standing.confidence[text, parent].flatten(0, 1),
            lengths=row_lengths(ids, self.config),
            mates=mates,
            mate_confidence=standing.confidence[text, mate].flatten(0, 1),
            mate_lengths=row_lengths(mates, self.config),
            uniforms=places,
            knobs=knobs,
        )
        moved = make(parents, chosen.flatten(), self.config)
        start = replace(
            blank(A * C, self.config, device=e.device), ids=moved.ids, confidence=moved.confidence
        )
        # Confidence reveals by rank, not by draw: one draw a place and step is all that filling needs.
        uniforms = fill.reshape(A * C, steps, 1, T).expand(-1, -1, 2, -1)
        e = aim_beyond(e[:, None], standing.vectors[text, parent], draws[..., 2:3]).flatten(0, 1)
        if self.config.causal:
            # What is to be written is written first; nothing is left in those rows to fill.
            rows = _causal_moves(chosen.device)[chosen.flatten()].nonzero().squeeze(1)
            plan = replace(WRITE, guidance=self.decoding.guidance).fit(self.config)
            # A place is written once, so one draw a place is enough for all steps.
            written = self._decode(e[rows], uniforms[rows, :1].expand(-1, T, -1, -1), plan, start.take(rows))
            start = Draft(
                *(getattr(start, f.name).index_copy(0, rows, getattr(written, f.name)) for f in fields(Draft))
            )
        done = self._decode(e, uniforms, None, start, moved.avoid)
        return Draft(*(getattr(done, f.name).unflatten(0, (A, C)) for f in fields(Draft)))

    def _decode(
        self, e: Tensor, uniforms: Tensor, options: DecodeOptions | None,
        start: Draft | None = None, avoid: Tensor | None = None,
    ) -> Draft:  # fmt: skip
        """Decode to the end, some rows at a time, and bring the rows into form.

        Without options masks are filled, in as many steps as there is need of.
        """
        start = blank(len(e), self.config, device=e.device) if start is None else start
        out = Draft(*(getattr(start, f.name).clone() for f in fields(Draft)))
        masks, order = (start.ids == self.config.mask_id).sum(1).sort(descending=True, stable=True)
        counts = masks.tolist()
        for first, stop in _parts(counts, ROWS.get(e.device.type, ROWS["cpu"])):
            rows = order[first:stop]
            fill = replace(FILL, guidance=self.decoding.guidance, steps=fill_steps(counts[first]))
            for draft in decode(
                self.model, e[rows], options=options or fill, diffusion=self.diffusion,
                uniforms=uniforms[rows], start=start.take(rows), avoid=None if avoid is None else avoid[rows],
            ):  # fmt: skip
                last = draft
            for f in fields(Draft):
                getattr(out, f.name)[rows] = getattr(last, f.name)
        ids, order = settle(out.ids, self.config)
        return replace(out, ids=ids, confidence=out.confidence.gather(1, order))

    def _rank(
        self, e: Tensor, standing: Standing, seen: Tensor, candidates: Draft, chosen: Tensor | None = None
    ) -> tuple[Standing, Tensor, Tensor]:
        """Embed the candidates (A, C, T) not seen before, and keep the best of them and of the pool.

        Returns what is seen by now as well, and the candidates' vectors, zeros where there was no call.
        """
        A, C, T = candidates.ids.shape
        ids = self.reader.respell(candidates.ids.flatten(0, 1))
        lengths = row_lengths(ids, self.config).squeeze(1)
        if seen.shape[1] >= REMEMBERED:
            # What is forgotten may be embedded again, and is counted again, but not kept twice.
            own = hash_rows(standing.ids.flatten(0, 1)).view(A, -1)
            seen = torch.cat((seen, own), 1).sort(dim=1).values
        fresh, seen = mark_fresh(hash_rows(ids).view(A, C), (lengths > 0).view(A, C), seen)
        seen = seen[:, :REMEMBERED]
        if self.options.budget is not None:
            # What the budget cuts off has been noted as seen, but then no round follows.
            fresh &= fresh.cumsum(1) <= (self.options.budget - standing.calls)[:, None]
        rows = fresh.flatten().nonzero().squeeze(1)
        vectors = self._embed(ids, lengths, rows, size=e.shape[1]).view(A, C, -1)
        cosine = F.cosine_similarity(vectors, e[:, None], dim=2).masked_fill(~fresh, -torch.inf)
        score, passes = cosine, candidates.passes.sum(1)
        if self.by_likelihood:
            # It only lowers a score: what is no nearer than the pool's last text is not read for it.
            near = fresh & (cosine > standing.score[:, -1:])
            rows = near.flatten().nonzero().squeeze(1)
            likelihood = self._likelihood(ids, lengths, rows, e[rows // C]).view(A, C)
            score = cosine + LIKELIHOOD[self.options.refine] * likelihood
            passes = passes + near.sum(1)

        every = torch.cat((standing.score, score), 1)
        # Stable, so that of equals the one that came first stays.
        best = every.argsort(dim=1, descending=True, stable=True)[:, : self.options.pool]
        entered = torch.zeros_like(every, dtype=torch.bool).scatter_(1, best, True)[:, -C:] & fresh
        text = torch.arange(A, device=e.device)[:, None]

        def keep(old: Tensor, new: Tensor) -> Tensor:
            """Choose what belongs to the best of the pool and the candidates."""
            return torch.cat((old, new), 1)[text, best]

        def count(what: Tensor) -> Tensor:
            """Count candidates by their move; drafts have none."""
            totals = torch.zeros((A, len(MOVES)), dtype=torch.long, device=e.device)
            return totals if chosen is None else totals.scatter_add_(1, chosen, what.long())

        kept = Standing(
            ids=keep(standing.ids, ids.view(A, C, T)),
            confidence=keep(standing.confidence, candidates.confidence),
            vectors=keep(standing.vectors, vectors),
            cosine=keep(standing.cosine, cosine),
            score=keep(standing.score, score),
            calls=standing.calls + fresh.sum(1),
            passes=standing.passes + passes,
            tries=standing.tries + count(fresh),
            entered=standing.entered + count(entered),
            improved=standing.improved + count(score > standing.score[:, :1]),
        )
        return kept, seen, vectors

    @property
    def by_likelihood(self) -> bool:
        """Whether the likelihood ranks too: where the cosine is a guess, if the model reads left to right."""
        return self.options.refine in LIKELIHOOD and self.config.causal

    def _embed(self, ids: Tensor, lengths: Tensor, rows: Tensor, *, size: int) -> Tensor:
        """Embed some of the rows: (N, E), of length 1, or zeros for the others."""
        vectors = torch.zeros((len(ids), size), device=ids.device)
        for part, width in _by_length(lengths[rows], ids.shape[1]):
            some = rows[part]
            vectors[some] = F.normalize(self.reader.embed(ids[some, :width], lengths[some]).float(), dim=1)
        return vectors

    def _likelihood(self, ids: Tensor, lengths: Tensor, rows: Tensor, e: Tensor) -> Tensor:
        """Log-likelihood a token, the end included, of some of the rows: (N,), or zeros for the others.

        Left to right, and given the vectors e of these rows: one pass reads all tokens of a text.
        """
        out = torch.zeros(len(ids), device=ids.device)
        for part, width in _by_length(lengths[rows], ids.shape[1]):
            some = ids[rows[part], :width]
            content = torch.arange(width, device=ids.device) <= lengths[rows[part], None]
            trunk = Trunk.of(self.model, e[part], guidance=1.0, causal=True)
            read = token_likelihood(trunk, some, content, guidance=1.0)
            out[rows[part]] = read.sum(1) / content.sum(1)
        return out


def _one_each(draft: Draft) -> Draft:
    """View drafts of one candidate a text as (A, 1, ...)."""
    return Draft(*(getattr(draft, f.name)[:, None] for f in fields(Draft)))


def _where_any(vectors: Tensor, others: Tensor) -> Tensor:
    """Take the rows that are not all zeros, and of the others those of another tensor."""
    return torch.where(vectors.any(1, keepdim=True), vectors, others)


def _by_length(lengths: Tensor, longest: int) -> Iterator[tuple[Tensor, int]]:
    """Part rows, the shortest first, so that they are not padded to the longest of all: which, how wide.

    A row is cut behind its end, which is still part of it.
    """
    ordered, order = lengths.sort(stable=True)
    widths, most = ordered.tolist(), ROWS.get(lengths.device.type, ROWS["cpu"])
    for first in range(0, len(widths), most):
        part = order[first : first + most]
        yield part, min(widths[first + len(part) - 1] + 1, longest)


def other_drafts(count: int, *, causal: bool) -> list[tuple[str, int, float]]:
    """List the kinds of so many drafts besides the first: corrections, then those drawn, in turn."""
    corrected, *drawn = CAUSAL_DRAFTS if causal else DRAFTS
    return list(islice(chain(repeat(corrected, CORRECTIONS), cycle(drawn)), count))


def _remember(seen: Tensor, rows: Tensor, known: Tensor) -> Tensor:
    """Note what some rows have seen by now; of the others only the width must agree."""
    seen = F.pad(seen, (0, known.shape[1] - seen.shape[1]), value=NEVER)
    seen[rows] = known
    return seen


def _causal_moves(device: torch.device) -> Tensor:
    """Which of the moves are written from left to right, (M,)."""
    return torch.tensor([move.causal for move in MOVES.values()], device=device)


def aim_beyond(e: Tensor, found: Tensor, draws: Tensor) -> Tensor:
    """Aim past the targets e, away from what was found (..., E): as far as draws in [0, 1) say.

    What the model writes for a vector errs in much the same way for vectors nearby. So it is asked for one
    that lies on the other side of the target, as an archer whose arrows fall short aims higher.
    """
    miss = e - found
    most = (FURTHEST / miss.norm(dim=-1, keepdim=True).clamp_min(1e-6)).clamp_max(LARGEST)
    share = ((draws - STRAIGHT) / (1 - STRAIGHT)).clamp_min(0)
    return e + share * most * miss


def choose_moves(
    past: Tensor, spread: Tensor, *, first: int, count: int, total: int, causal: bool = True
) -> Tensor:
    """Choose a move for some of a round's candidates (A, count), more often those that paid; past (2, A, M).

    A move's share goes with its rewards by try, each move starting with the same belief, and never
    falls to nothing, since what does not pay early may pay late. One uniform a text, `spread` (A, 1),
    spreads the candidates over the shares evenly. Moves that write from left to right are left out if
    the model is not `causal`.
    """
    tries, rewards = past
    rate = (rewards + 1) / (tries + 4)
    share = 0.8 * rate / rate.sum(1, keepdim=True) + 0.2 / len(MOVES)
    if not causal:
        share = share.masked_fill(_causal_moves(share.device), 0.0)
        share = share / share.sum(1, keepdim=True)
    points = (torch.arange(first, first + count, device=spread.device) + spread) / total
    return torch.searchsorted(share.cumsum(1), points).clamp(max=len(MOVES) - 1)


def hash_rows(ids: Tensor) -> Tensor:
    """Hash rows (N, T) to (N,), so that rows collide by no more than chance."""
    return (ids * hash_weights(ids.shape[1], device=ids.device)).sum(1).clamp(max=NEVER - 1)


def fill_steps(masks: int) -> int:
    """Steps in which so many masks are filled: what is filled at once does not know of one another.

    >>> [fill_steps(n) for n in (1, 2, 5, 6, 12, 32)]
    [1, 2, 2, 3, 4, 7]
    """
    return min(masks, FILL.steps + masks // MASKS_A_STEP)


def _parts(masks: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Cut rows, sorted by their masks (the most first), into parts of at most so many: from, to.

    All rows of a part are filled in the same number of steps; rows without a mask are in none.
    """
    first = 0
    for steps, rows in groupby(masks, fill_steps):
        stop = first + len(list(rows))
        if steps:
            yield from ((k, min(k + most, stop)) for k in range(first, stop, most))
        first = stop


def mark_fresh(hashes: Tensor, valid: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Mark the first of each valid hash (A, C) not among those seen (A, S), sorted; and add them."""
    hashes = hashes.masked_fill(~valid, NEVER)
    ordered, order = hashes.sort(dim=1, stable=True)
    again = F.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0), value=False)
    fresh = valid & ~torch.zeros_like(again).scatter_(1, order, again)
    if seen.shape[1]:
        place = torch.searchsorted(seen, hashes).clamp(max=seen.shape[1] - 1)
        fresh &= seen.gather(1, place) != hashes
    merged = torch.cat((seen, hashes.masked_fill(~fresh, NEVER)), 1)
    return fresh, merged.sort(dim=1).values


def _nothing(e: Tensor, pool: int, config: ModelConfig) -> Standing:
    """Make the standing before the first draft: free places hold a mask, from which moves can start."""
    B, T = len(e), config.max_tokens
    ids = torch.full((B, pool, T), config.pad_id, device=e.device)
    ids[..., 1:2], ids[..., 0] = config.end_id, config.mask_id
    none = torch.zeros((B, len(MOVES)), dtype=torch.long, device=e.device)
    count = torch.zeros(B, dtype=torch.long, device=e.device)
    return Standing(
        ids=ids,
        confidence=torch.zeros((B, pool, T), device=e.device),
        vectors=e[:, None].expand(-1, pool, -1),
        cosine=torch.full((B, pool), -torch.inf, device=e.device),
        score=torch.full((B, pool), -torch.inf, device=e.device),
        calls=count, passes=count, tries=none, entered=none, improved=none,
    )  # fmt: skip

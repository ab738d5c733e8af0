"""The closed loop: drafts, then rounds of moves, each candidate ranked by what its embedding says.

Knows the decoding loop, the moves, and how an encoder is asked. Must not know checkpoints, or what
becomes of the answer. A text's draws depend on the seed, its number and the round alone, and so does
its choice of moves, so the texts that share its batch do not change its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unembed.config import DiffusionConfig, ModelConfig
from unembed.decode import DecodeOptions, Draft, Model, blank, decode, draw_uniforms
from unembed.errors import UnembedError, unknown_name
from unembed.moves import KNOBS, MOVES, Parents, make, row_lengths, settle

if TYPE_CHECKING:
    from unembed.encoders import Encoder
    from unembed.tokens import TextTokenizer

Refine = Literal["encoder"]

# Rounding a vector turns it by an angle of about its relative error d, and 1 - cosine is d^2 / 2: with
# MiniLM at most 3e-8 for vectors kept in half precision and 2e-6 in bfloat16, while float32 itself
# resolves 1e-7. The least that a change of one token did, of 1,574 tried, is 1.2e-4.
EXACT = 1 - 1e-5

# Besides the draft that was asked for: strategy, steps, temperature.
DRAFTS = (("confidence", 8, 1.0), ("confidence", 8, 1.0), ("euler", 8, 0.7))
FILL = DecodeOptions("confidence", 2, temperature=0.7)

# Rows that go through the model together: bounds the logits, at most T x V numbers a row.
ROWS = {"cpu": 64, "cuda": 512}
# Weight of a move's past: after each round what was counted before counts for so much.
MEMORY = 0.9
NEVER = torch.iinfo(torch.long).max


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


class Reader:
    """Reads candidates as the encoder would: rows of ids in, vectors out."""

    def __init__(self, encoder: Encoder, tokenizer: TextTokenizer) -> None:
        """Take the way through ids where the encoder has one and shares the vocabulary."""
        self.encoder, self.tokenizer = encoder, tokenizer
        own: TextTokenizer | None = getattr(encoder, "tokenizer", None)
        shares = own is not None and own.to_json() == tokenizer.to_json()
        self.by_ids = shares and _takes_ids(encoder)

    def respell(self, ids: Tensor) -> Tensor:
        """Spell rows as the tokenizer spells their text; rows without a token come back empty.

        The truth is spelt like that, so another spelling is never it, and two spellings of a text
        must not cost two calls.
        """
        texts = self.tokenizer.decode(ids.cpu().numpy())
        again = self.tokenizer.encode(texts, max_tokens=ids.shape[1], allow_empty=True)
        return torch.from_numpy(again.ids).to(ids.device)

    def embed(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Embed respelt rows that are not empty."""
        if self.by_ids:
            encoder: Any = self.encoder
            device = getattr(encoder, "device", ids.device)
            return encoder.encode_ids(ids.to(device), lengths.to(device)).to(ids.device)
        texts = self.tokenizer.decode(ids.cpu().numpy())
        return torch.from_numpy(np.asarray(self.encoder.encode(texts), np.float32)).to(ids.device)


@dataclass(frozen=True)
class Standing:
    """Where every text stands after a round; a pool is sorted, the best first."""

    ids: Tensor  # (B, P, T)
    confidence: Tensor  # (B, P, T)
    cosine: Tensor  # (B, P), -inf where the pool has a free place
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
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext  # of the model, not of the encoder

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
        numbers = np.arange(first, first + B)
        rows, passes = self._draft(e, numbers)
        seen = torch.full((B, 0), NEVER, device=e.device)
        standing, seen = self._rank(e, _nothing(e, options.pool, self.config), seen, rows, passes, None)
        past = torch.zeros((2, B, len(MOVES)), device=e.device)  # tries and rewards of each move
        yield standing
        for round_ in range(1, options.rounds + 1):
            left = ~standing.exact
            if options.budget is not None:
                left &= standing.calls < options.budget
            active = left.nonzero().squeeze(1)
            if not len(active):
                return
            draws = self._draws(numbers[active.cpu().numpy()], round_).to(e.device)
            now, known = standing.take(active), seen[active]
            chosen = choose_moves(past[:, active], draws[..., 0])
            candidates, passes = self._propose(e[active], now, chosen, draws[..., 1:])
            now, known = self._rank(e[active], now, known, candidates, passes, chosen)
            # Rows that have left keep what they have seen; only the width must agree.
            seen = F.pad(seen, (0, known.shape[1] - seen.shape[1]), value=NEVER)
            seen[active] = known
            past *= MEMORY
            past[:, active] += torch.stack((now.tries, now.entered + now.improved)).float()
            standing = standing.put(active, now)
            yield standing

    def _draft(self, e: Tensor, numbers: np.ndarray) -> tuple[Draft, Tensor]:
        """Write the first candidates: the draft that was asked for, and a few of other kinds."""
        asked, T = self.decoding, self.config.max_tokens
        first, stop, seed = int(numbers[0]), int(numbers[-1]) + 1, self.options.seed
        # The draws of the open loop, so that the first draft is the open loop's answer.
        uniforms = draw_uniforms(first, stop, steps=asked.steps, length=T, seed=seed)
        drafts = [self._decode(e, uniforms.to(e.device), asked)]
        others = min(self.options.pool, self.options.budget or self.options.pool) - 1
        kinds = [DRAFTS[i % len(DRAFTS)] for i in range(others)]
        for part, kind in enumerate(dict.fromkeys(kinds)):
            (strategy, steps, temperature), count = kind, kinds.count(kind)
            plan = replace(asked, strategy=strategy, steps=min(steps, T), temperature=temperature)
            uniforms = self._stream(numbers, (0, part), (count, plan.steps, 2, T)).flatten(0, 1)
            drafts.append(self._decode(e.repeat_interleave(count, 0), uniforms.to(e.device), plan))
        rows = [
            torch.cat([getattr(d, f.name).unflatten(0, (len(e), -1)) for d in drafts], 1)
            for f in fields(Draft)
        ]
        return Draft(*rows), rows[2].sum(1)

    def _propose(self, e: Tensor, standing: Standing, chosen: Tensor, draws: Tensor) -> tuple[Draft, Tensor]:
        """Make moves from pool members and fill the masks: (A, C, T) candidates and (A,) passes."""
        A, C = chosen.shape
        T = self.config.max_tokens
        size = standing.cosine.isfinite().sum(1, keepdim=True).clamp(min=1)
        # Squared, so that better texts are the parents of more candidates.
        parent = (draws[..., 0].square() * size).long()
        mate = (parent + 1 + (draws[..., 1] * (size - 1)).long()) % size  # another one, if there is one
        text = torch.arange(A, device=e.device)[:, None]
        ids, mates = standing.ids[text, parent].flatten(0, 1), standing.ids[text, mate].flatten(0, 1)
        flat = draws[..., 2:].flatten(0, 1)
        knobs, places, fill = flat.split((KNOBS, T, FILL.steps * T), dim=1)
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
        start = Draft(moved.ids, moved.confidence, torch.zeros(A * C, dtype=torch.long, device=e.device))
        options = replace(FILL, guidance=self.decoding.guidance)
        # Confidence reveals by rank, not by draw: one draw a place and step is all that filling needs.
        uniforms = fill.reshape(A * C, FILL.steps, 1, T).expand(-1, -1, 2, -1)
        done = self._decode(e.repeat_interleave(C, 0), uniforms, options, start, moved.avoid)
        draft = Draft(*(getattr(done, f.name).unflatten(0, (A, C)) for f in fields(Draft)))
        return draft, draft.passes.sum(1)

    def _decode(
        self, e: Tensor, uniforms: Tensor, options: DecodeOptions,
        start: Draft | None = None, avoid: Tensor | None = None,
    ) -> Draft:  # fmt: skip
        """Decode to the end, some rows at a time, and bring the rows into form."""
        start = blank(len(e), self.config, device=e.device) if start is None else start
        masked = (start.ids == self.config.mask_id).any(1).nonzero().squeeze(1)
        out = Draft(start.ids.clone(), start.confidence.clone(), start.passes.clone())
        for rows in masked.split(ROWS.get(e.device.type, ROWS["cpu"])):
            some = Draft(start.ids[rows], start.confidence[rows], start.passes[rows])
            with self.precision():
                for draft in decode(
                    self.model, e[rows], options=options, diffusion=self.diffusion,
                    uniforms=uniforms[rows], start=some, avoid=None if avoid is None else avoid[rows],
                ):  # fmt: skip
                    last = draft
            out.ids[rows], out.confidence[rows], out.passes[rows] = last.ids, last.confidence, last.passes
        ids, order = settle(out.ids, self.config)
        return Draft(ids, out.confidence.gather(1, order), out.passes)

    def _rank(
        self, e: Tensor, standing: Standing, seen: Tensor, candidates: Draft, passes: Tensor,
        chosen: Tensor | None,
    ) -> tuple[Standing, Tensor]:  # fmt: skip
        """Embed the candidates (A, C, T) not seen before, and keep the best of them and of the pool."""
        A, C, T = candidates.ids.shape
        ids = self.reader.respell(candidates.ids.flatten(0, 1))
        lengths = row_lengths(ids, self.config).squeeze(1)
        fresh, seen = mark_fresh(hash_rows(ids).view(A, C), (lengths > 0).view(A, C), seen)
        if self.options.budget is not None:
            # What the budget cuts off has been noted as seen, but then no round follows.
            fresh &= fresh.cumsum(1) <= (self.options.budget - standing.calls)[:, None]
        cosine = torch.full((A, C), -torch.inf, device=e.device)
        cosine[fresh] = self._cosines(e, ids, lengths, fresh.flatten().nonzero().squeeze(1), C)

        every = torch.cat((standing.cosine, cosine), 1)
        # Stable, so that of equals the one that came first stays.
        best, order = every.sort(dim=1, descending=True, stable=True)
        best, order = best[:, : self.options.pool], order[:, : self.options.pool]
        joined = torch.cat((standing.ids, ids.view(A, C, T)), 1)
        sure = torch.cat((standing.confidence, candidates.confidence), 1)
        where = order[..., None].expand(-1, -1, T)
        entered = torch.zeros_like(every, dtype=torch.bool).scatter_(1, order, True)[:, -C:] & fresh
        improved = cosine > standing.cosine[:, :1]

        def count(what: Tensor) -> Tensor:
            """Count candidates by their move; drafts have none."""
            totals = torch.zeros((A, len(MOVES)), dtype=torch.long, device=e.device)
            return totals if chosen is None else totals.scatter_add_(1, chosen, what.long())

        return Standing(
            joined.gather(1, where), sure.gather(1, where), best,
            standing.calls + fresh.sum(1), standing.passes + passes,
            count(fresh), count(entered), count(improved),
        ), seen  # fmt: skip

    def _cosines(self, e: Tensor, ids: Tensor, lengths: Tensor, rows: Tensor, each: int) -> Tensor:
        """Cosines between the embeddings of some rows and the vectors, of which each has `each` rows."""
        cosine = torch.empty(len(ids), device=e.device)
        # By length, so that short texts are not padded to the longest of all.
        for some in rows[lengths[rows].argsort(stable=True)].split(ROWS.get(e.device.type, ROWS["cpu"])):
            if not len(some):  # of nothing, split makes one empty part
                continue
            # A row is cut behind its end, of which the text path has need.
            width = min(int(lengths[some].max()) + 1, ids.shape[1])
            vectors = self.reader.embed(ids[some, :width], lengths[some])
            cosine[some] = F.cosine_similarity(vectors.float(), e[some // each].float(), dim=1)
        return cosine[rows]

    def _draws(self, numbers: np.ndarray, round_: int) -> Tensor:
        """Uniforms (A, C, ...) of a round: the move, parent, mate, knobs, places, filling."""
        shape = self.options.candidates, 3 + KNOBS + (1 + FILL.steps) * self.config.max_tokens
        return self._stream(numbers, (round_, 0), shape)

    def _stream(self, numbers: np.ndarray, when: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
        """Uniforms (A, *shape) that depend on the seed, each text's number and the moment alone."""
        seed, (round_, part) = self.options.seed, when
        # The highest word of the counter sets them apart from those of `draw_uniforms`.
        counters = (np.array([0, round_, n, 1 + part], dtype=np.uint64) for n in numbers)
        streams = (np.random.Generator(np.random.Philox(key=seed, counter=c)) for c in counters)
        rows = np.stack([stream.random(shape, dtype=np.float32) for stream in streams])
        return torch.from_numpy(rows)


def _takes_ids(encoder: Any) -> bool:
    """Whether an encoder embeds ids; some prompts join the text's first token, and then it refuses."""
    if not hasattr(encoder, "encode_ids"):
        return False
    try:
        one = torch.ones((1, 1), dtype=torch.long, device=getattr(encoder, "device", "cpu"))
        encoder.encode_ids(one, one[0])
    except UnembedError:
        return False
    return True


def choose_moves(past: Tensor, uniforms: Tensor) -> Tensor:
    """Choose a move for each candidate (A, C), more often those that paid; past (2, A, M).

    A move's share goes with its rewards by try, each move starting with the same belief, and never
    falls to nothing, since what does not pay early may pay late. One uniform a text spreads the
    candidates over the shares evenly.
    """
    tries, rewards = past
    rate = (rewards + 1) / (tries + 4)
    share = 0.8 * rate / rate.sum(1, keepdim=True) + 0.2 / len(MOVES)
    C = uniforms.shape[1]
    points = (torch.arange(C, device=uniforms.device) + uniforms[:, :1]) / C
    return torch.searchsorted(share.cumsum(1), points).clamp(max=len(MOVES) - 1)


def hash_rows(ids: Tensor) -> Tensor:
    """Hash rows (N, T) to (N,): random weights modulo 2^64, so that rows collide by no more than chance."""
    weights = np.random.Philox(key=1).random_raw(ids.shape[1]).view(np.int64) | 1
    return (ids * torch.from_numpy(weights).to(ids.device)).sum(1).clamp(max=NEVER - 1)


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
        cosine=torch.full((B, pool), -torch.inf, device=e.device),
        calls=count, passes=count, tries=none, entered=none, improved=none,
    )  # fmt: skip

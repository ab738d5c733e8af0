"""The conditional transformer: noisy ids and a vector in, logits out. Nothing else.

Letters: B batch, T length, D width, V vocabulary, E size of the vector, H heads.
It must not know of schedules, strategies or text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unembed.config import ModelConfig

# What one layer keeps of rows that are read place by place: keys and values (B, H, T, 2D/H), changed in
# place, and where in them those of the places at hand belong.
Kept = tuple[Tensor, Tensor]


class Projection(nn.Module):
    """e -> c = W2 GELU(W1 e + b1) + b2 (equation 5); a learned vector stands for 'no condition'."""

    def __init__(self, embedding_size: int, hidden: int) -> None:
        """Build the two layers and the null condition."""
        super().__init__()
        self.w1 = nn.Linear(embedding_size, hidden)
        self.w2 = nn.Linear(hidden, hidden)
        self.null = nn.Parameter(torch.zeros(hidden))
        self.scale = embedding_size**0.5

    def forward(self, e: Tensor, drop: Tensor | None = None) -> Tensor:
        """Map unit vectors e (B, E) to c (B, D); rows where `drop` is true get the null condition."""
        # A unit vector has entries of about 1/sqrt(E); scaled, they are of order one.
        x = F.normalize(e.float(), dim=-1) * self.scale
        c = self.w2(F.gelu(self.w1(x.to(self.null.dtype))))
        return c if drop is None else torch.where(drop[:, None], self.null.to(c.dtype), c)


class Modulation(nn.Module):
    """c, t -> `chunks` vectors of width D, all zero at first: AdaLN starts as plain LN.

    gamma = gamma_t + gamma_c (equations 6 to 9), each a single linear map; of low rank if asked, and then
    with a diagonal beside it if asked: by that alone each channel hears all that its own channel of c says.
    """

    diagonal: Tensor | None

    def __init__(self, config: ModelConfig, chunks: int) -> None:
        """Build the maps from c and, with time conditioning, from t."""
        super().__init__()
        D, rank = config.hidden, config.adaln_rank
        self.chunks = chunks
        self.down = nn.Linear(D, rank, bias=False) if rank else nn.Identity()
        self.up = nn.Linear(rank or D, chunks * D)
        diagonal = nn.Parameter(torch.zeros(chunks * D)) if config.adaln_diagonal else None
        self.register_parameter("diagonal", diagonal)
        self.time = nn.Linear(1, chunks * D) if config.time_conditioning else None
        for linear in filter(None, (self.up, self.time)):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, c: Tensor, t: Tensor | None) -> tuple[Tensor, ...]:
        """Return `chunks` tensors of shape (B, 1, D)."""
        return self.split(self.of(c), t)

    def of(self, c: Tensor) -> Tensor:
        """Return the part that c decides, (B, chunks * D)."""
        known = self.up(self.down(c))
        return known if self.diagonal is None else known + self.diagonal * c.repeat(1, self.chunks)

    def split(self, known: Tensor, t: Tensor | None) -> tuple[Tensor, ...]:
        """Add the part that t decides to that of c, and cut it into `chunks`."""
        if self.time is not None and t is not None:
            known = known + self.time(t[:, None].to(known.dtype))
        return known[:, None].chunk(self.chunks, dim=-1)


class Attention(nn.Module):
    """Bidirectional self-attention with normalised queries and keys, rotary if given turns."""

    def __init__(self, config: ModelConfig) -> None:
        """Build the four projections; q, k and v are one matrix."""
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)
        self.q_scale = nn.Parameter(torch.ones(config.hidden // config.heads))
        self.k_scale = nn.Parameter(torch.ones(config.hidden // config.heads))

    def forward(
        self, x: Tensor, turns: Tensor | None, ahead: Tensor | None, kept: Kept | None = None
    ) -> Tensor:
        """Attend from every place of x (B, T, D) to all but those `ahead` of it; `turns` are of its places.

        With `kept` they are some places of a longer row, and attend to all of it that was read.
        """
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # (B, H, T, D/H)
        q = F.rms_norm(q, q.shape[-1:]) * self.q_scale
        k = F.rms_norm(k, k.shape[-1:]) * self.k_scale
        if turns is not None:
            q, k = rotate(q, turns), rotate(k, turns)
        if kept is not None:
            row, where = kept
            k, v = row.scatter_(2, where, torch.cat((k, v), -1).to(row.dtype)).chunk(2, dim=-1)
        h = attend(q.to(v.dtype), k.to(v.dtype), v, ahead)
        return self.out(h.transpose(1, 2).reshape(B, T, D))


def attend(q: Tensor, k: Tensor, v: Tensor, ahead: Tensor | None = None) -> Tensor:
    """Attention of (B, H, T, D/H) to all but what is `ahead` (B, 1, T, T).

    By the formula itself where rows are short and weights are trained.

    Flash kernels are made for long rows: at 32 tokens the plain formula, fused by the compiler, trains
    faster. Alone, they have the fewer launches.
    """
    if q.shape[-2] > 64 or not torch.compiler.is_compiling():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=None if ahead is None else ~ahead)
    scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
    if ahead is not None:
        scores = scores.masked_fill(ahead, float("-inf"))
    return scores.softmax(-1).to(v.dtype) @ v


def place_turns(length: int, size: int, *, device: torch.device | str | None = None) -> Tensor:
    """Cosines and sines (2, T, D/2H) of the angles by which places turn channels, slower and slower."""
    speed = 1000.0 ** -(torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * speed
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn each pair of channels of x (..., T, D/H) by an angle that grows with its place."""
    cos, sin = turns.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    """Attention and feed-forward, each behind an AdaLN with scale, shift and gate."""

    def __init__(self, config: ModelConfig) -> None:
        """Build both sub-layers and their modulation."""
        super().__init__()
        self.dropout = config.dropout
        self.modulation = Modulation(config, 6)
        self.attention = Attention(config)
        self.up = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(
        self,
        x: Tensor,
        known: Tensor,
        t: Tensor | None,
        turns: Tensor | None,
        ahead: Tensor | None = None,
        kept: Kept | None = None,
    ) -> Tensor:
        """Update the residual stream x (B, T, D); `known` is what the modulation makes of c."""
        scale1, shift1, gate1, scale2, shift2, gate2 = self.modulation.split(known, t)
        h = self.attention(adaln(x, scale1, shift1), turns, ahead, kept)
        x = x + (1 + gate1) * F.dropout(h, self.dropout, self.training)
        h = self.down(F.gelu(self.up(adaln(x, scale2, shift2))))
        return x + (1 + gate2) * F.dropout(h, self.dropout, self.training)


def adaln(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Normalise without an affine map of its own, then modulate (equation 10)."""
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


class Denoiser(nn.Module):
    """p(x0 | xt, e): the whole network."""

    turns: Tensor | None
    shifted: Tensor  # of a causal model; None in others
    whole: Tensor  # of a model that guesses vectors; None in others

    def __init__(self, config: ModelConfig) -> None:
        """Build the network with fresh weights."""
        super().__init__()
        self.config = config
        self.projection = Projection(config.embedding_size, config.hidden)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden)
        # Kept beside rotary ones: in an all-masked row nothing else tells one place from another.
        self.places = nn.Parameter(torch.empty(config.max_tokens, config.hidden))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.modulation = Modulation(config, 2)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        # Tells a place that what it is given is not its own token but the one before.
        shifted = nn.Parameter(torch.zeros(config.hidden)) if config.causal else None
        self.register_parameter("shifted", shifted)
        # Stands for the vector where it is to be guessed, and the map that it is guessed by.
        whole = nn.Parameter(torch.zeros(config.hidden)) if config.embeds else None
        self.register_parameter("whole", whole)
        self.vector = nn.Linear(config.hidden, config.embedding_size) if config.embeds else None
        # A table: computed anew in every layer, the sines cost more than the products around them.
        # Held on the CPU even where weights are only sketched (meta): no checkpoint brings it.
        turns = place_turns(config.max_tokens, config.hidden // config.heads, device="cpu")
        self.register_buffer("turns", turns if config.positions == "rotary" else None, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Draw matrices with small entries; what writes into the residual stream smaller still."""
        for name, p in self.named_parameters():
            if p.dim() < 2 or name.endswith(("modulation.up.weight", "modulation.time.weight")):
                continue
            residual = name.endswith(("out.weight", "down.weight")) and "modulation" not in name
            std = 0.02 / (2 * self.config.layers) ** 0.5 if residual else 0.02
            nn.init.normal_(p, std=p.shape[1] ** -0.5 if name.startswith("projection") else std)

    def condition(
        self, e: Tensor, *, drop: Tensor | None = None, whole: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """All that the vectors decide, whatever the ids: decoding asks once and hands it to each `hidden`."""
        c = self.projection(e, drop)
        if whole is not None:
            c = torch.where(whole[:, None], self.whole.to(c.dtype), c)
        return tuple(part.modulation.of(c) for part in (*self.blocks, self))

    def hidden(
        self,
        xt: Tensor,
        e: Tensor,
        *,
        t: Tensor | None = None,
        drop: Tensor | None = None,
        condition: tuple[Tensor, ...] | None = None,
        causal: Tensor | None = None,
        whole: Tensor | None = None,
    ) -> Tensor:
        """Run the trunk: final hidden states (B, T, D), ready for the head.

        In rows that are `causal` (B,) each place is given the token before it and sees nothing further on,
        so that one pass predicts every token from those on its left. In rows that are `whole` (B,) texts
        the vector is not told, and no place sees the padding, of which there may be any number.
        """
        condition = self.condition(e, drop=drop, whole=whole) if condition is None else condition
        T = xt.shape[1]
        ahead = None
        outside = None if whole is None else (whole[:, None] & (xt == self.config.pad_id))[:, None, None]
        if causal is not None:
            before = F.pad(xt[:, :-1], (1, 0), value=self.config.mask_id)
            xt = torch.where(causal[:, None], before, xt)
            later = torch.ones((T, T), dtype=torch.bool, device=xt.device).triu(1)
            ahead = causal[:, None, None, None] & later
        if outside is not None:
            ahead = outside if ahead is None else ahead | outside
        turns = None if self.turns is None else self.turns[:, :T]
        # In half precision the residual stream is half too: it is most of what a step reads and writes.
        x = self.tokens(xt) + self.places[:T]
        if causal is not None:
            x = x + causal[:, None, None] * self.shifted
        x = x.to(condition[-1].dtype)
        for block, known in zip(self.blocks, condition, strict=False):
            x = block(x, known, t, turns, ahead)
        return adaln(x, *self.modulation.split(condition[-1], t))

    def cache(self, condition: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Room for what `read` keeps of the rows of a condition, nothing read so far: a tensor a layer."""
        heads, T = self.config.heads, self.config.max_tokens
        # Zeros: what is not yet read has no weight in the attention, but nothing times NaN is NaN.
        return tuple(
            part.new_zeros((len(part), heads, T, 2 * self.config.hidden // heads)) for part in condition[:-1]
        )

    def read(
        self,
        xt: Tensor,
        where: Tensor,
        *,
        condition: tuple[Tensor, ...],
        cache: Sequence[Tensor],
        t: Tensor | None = None,
    ) -> Tensor:
        """Run the trunk at some places (B, N) of causal rows xt (B, T) only: what `hidden` gives there.

        All on their left must have been read into the cache before, or be among them.
        """
        before = F.pad(xt[:, :-1], (1, 0), value=self.config.mask_id).gather(1, where)
        ahead = torch.arange(cache[0].shape[2], device=xt.device) > where[:, None, :, None]  # (B, 1, N, T)
        index = where[:, None, :, None].expand(-1, self.config.heads, -1, cache[0].shape[3])
        turns = None if self.turns is None else self.turns[:, where][:, :, None]
        x = (self.tokens(before) + self.places[where] + self.shifted).to(condition[-1].dtype)
        for block, known, row in zip(self.blocks, condition, cache, strict=False):
            x = block(x, known, t, turns, ahead, (row, index))
        return adaln(x, *self.modulation.split(condition[-1], t))

    embeds = False  # whether `embed` was trained

    def embed(self, ids: Tensor) -> Tensor:
        """Guess the vectors (B, E) of whole texts ids (B, T), padding behind them; they have length one."""
        c = self.whole[None]
        condition = tuple(part.modulation.of(c).expand(len(ids), -1) for part in (*self.blocks, self))
        every = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        t = torch.zeros(len(ids), device=ids.device)
        return self.vectors(self.hidden(ids, condition[-1], t=t, condition=condition, whole=every), ids)

    def vectors(self, h: Tensor, ids: Tensor) -> Tensor:
        """What `embed` reads off the hidden states (B, T, D) of whole texts: their mean, mapped."""
        assert self.vector is not None
        text = (ids != self.config.pad_id)[..., None]
        mean = (h * text).sum(1) / text.sum(1).clamp_min(1)
        return F.normalize(self.vector(mean.to(h.dtype)).float(), dim=-1)

    hears = False  # whether `bag` was trained

    def bag(self, e: Tensor) -> Tensor:
        """Logits (B, V) of the text's tokens in any order, read off the projected vector."""
        return self.head(self.gist(e))

    def gist(self, e: Tensor) -> Tensor:
        """What `bag` is read off, (B, D): a hidden state that knows of no place."""
        c = self.projection(e)
        return F.layer_norm(c, c.shape[-1:])

    def head(self, h: Tensor) -> Tensor:
        """Logits of hidden states; [MASK] is never predicted."""
        return F.linear(h, self.tokens.weight, self._word_bias())

    def head_for(self, words: Tensor) -> Callable[[Tensor], Tensor]:
        """Make a head for some words (N,) alone: what `head` gives at them."""
        return partial(F.linear, weight=self.tokens.weight[words], bias=self._word_bias()[words])

    def _word_bias(self) -> Tensor:
        """Return the head's bias (V,), which carries [MASK]'s -inf: to fill logits would copy gigabytes."""
        # Made on the device: sent to it, a GPU would be waited for.
        mask = torch.full((), self.config.mask_id, device=self.bias.device)
        return self.bias.index_fill(0, mask, float("-inf"))

    def forward(
        self,
        xt: Tensor,
        e: Tensor,
        *,
        t: Tensor | None = None,
        drop: Tensor | None = None,
        where: Tensor | None = None,
    ) -> Tensor:
        """Predict the clean tokens of xt (B, T) given vectors e (B, E).

        Args:
            xt: Ids, masked where unknown.
            e: Vectors; any length but zero, they are normalised.
            t: Time of each row (B,), read only with time conditioning.
            drop: Rows (B,) that must not see their vector.
            where: Places (B, T) at which logits are wanted; all if None.

        Returns:
            Logits (B, T, V), or (N, V) for the N places of `where` in row-major order.
        """
        h = self.hidden(xt, e, t=t, drop=drop)
        return self.head(h if where is None else h[where])


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """Count all parameters and the trainable ones, each tensor once."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)

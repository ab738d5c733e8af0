"""The conditional transformer: noisy ids and a vector in, logits out. Nothing else.

Letters: B batch, T length, D width, V vocabulary, E size of the vector, H heads.
It must not know of schedules, strategies or text.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unembed.config import ModelConfig


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
        c = self.w2(F.gelu(self.w1(F.normalize(e, dim=-1) * self.scale)))
        return c if drop is None else torch.where(drop[:, None], self.null.to(c.dtype), c)


class Modulation(nn.Module):
    """c, t -> `chunks` vectors of width D, all zero at first: AdaLN starts as plain LN.

    gamma = gamma_t + gamma_c (equations 6 to 9), each a single linear map; of low rank if asked.
    """

    def __init__(self, config: ModelConfig, chunks: int) -> None:
        """Build the maps from c and, with time conditioning, from t."""
        super().__init__()
        D, rank = config.hidden, config.adaln_rank
        self.chunks = chunks
        self.down = nn.Linear(D, rank, bias=False) if rank else nn.Identity()
        self.up = nn.Linear(rank or D, chunks * D)
        self.time = nn.Linear(1, chunks * D) if config.time_conditioning else None
        for linear in filter(None, (self.up, self.time)):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, c: Tensor, t: Tensor | None) -> tuple[Tensor, ...]:
        """Return `chunks` tensors of shape (B, 1, D)."""
        out = self.up(self.down(c))
        if self.time is not None and t is not None:
            out = out + self.time(t[:, None].to(c.dtype))
        return out[:, None].chunk(self.chunks, dim=-1)


class Attention(nn.Module):
    """Bidirectional self-attention with normalised queries and keys, rotary if asked."""

    def __init__(self, config: ModelConfig) -> None:
        """Build the four projections; q, k and v are one matrix."""
        super().__init__()
        self.heads = config.heads
        self.rotary = config.positions == "rotary"
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)
        self.q_scale = nn.Parameter(torch.ones(config.hidden // config.heads))
        self.k_scale = nn.Parameter(torch.ones(config.hidden // config.heads))

    def forward(self, x: Tensor) -> Tensor:
        """Attend from every place to every place of x (B, T, D)."""
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # (B, H, T, D/H)
        q = F.rms_norm(q, q.shape[-1:]) * self.q_scale
        k = F.rms_norm(k, k.shape[-1:]) * self.k_scale
        if self.rotary:
            q, k = rotate(q), rotate(k)
        h = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v)
        return self.out(h.transpose(1, 2).reshape(B, T, D))


def rotate(x: Tensor) -> Tensor:
    """Turn each pair of channels of x (..., T, D/H) by an angle that grows with its place."""
    T, d = x.shape[-2:]
    speed = 1000.0 ** -(torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / d)
    angle = torch.arange(T, device=x.device, dtype=torch.float32)[:, None] * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    """Attention and feed-forward, each behind an AdaLN with scale, shift and gate."""

    def __init__(self, config: ModelConfig) -> None:
        """Build both sub-layers and their modulation."""
        super().__init__()
        self.modulation = Modulation(config, 6)
        self.attention = Attention(config)
        self.up = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor, c: Tensor, t: Tensor | None) -> Tensor:
        """Update the residual stream x (B, T, D)."""
        scale1, shift1, gate1, scale2, shift2, gate2 = self.modulation(c, t)
        x = x + (1 + gate1) * self.attention(adaln(x, scale1, shift1))
        return x + (1 + gate2) * self.down(F.gelu(self.up(adaln(x, scale2, shift2))))


def adaln(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Normalise without an affine map of its own, then modulate (equation 10)."""
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


class Denoiser(nn.Module):
    """p(x0 | xt, e): the whole network."""

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
        self._initialise()

    def _initialise(self) -> None:
        """Draw matrices with small entries; what writes into the residual stream smaller still."""
        for name, p in self.named_parameters():
            if p.dim() < 2 or name.endswith(("modulation.up.weight", "modulation.time.weight")):
                continue
            residual = name.endswith(("out.weight", "down.weight")) and "modulation" not in name
            std = 0.02 / (2 * self.config.layers) ** 0.5 if residual else 0.02
            nn.init.normal_(p, std=p.shape[1] ** -0.5 if name.startswith("projection") else std)

    def hidden(self, xt: Tensor, e: Tensor, *, t: Tensor | None = None, drop: Tensor | None = None) -> Tensor:
        """Run the trunk: final hidden states (B, T, D), ready for the head."""
        c = self.projection(e, drop)
        x = self.tokens(xt) + self.places[: xt.shape[1]]
        for block in self.blocks:
            x = block(x, c, t)
        return adaln(x, *self.modulation(c, t))

    def bag(self, e: Tensor) -> Tensor:
        """Logits (B, V) of the text's tokens in any order, read off the projected vector."""
        c = self.projection(e)
        return self.head(F.layer_norm(c, c.shape[-1:]))

    def head(self, h: Tensor) -> Tensor:
        """Logits of hidden states; [MASK] is never predicted."""
        # The bias carries the -inf: filling the logits themselves would copy gigabytes.
        mask = torch.tensor(self.config.mask_id, device=h.device)
        return F.linear(h, self.tokens.weight, self.bias.index_fill(0, mask, float("-inf")))

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

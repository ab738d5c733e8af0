"""The conditional denoiser around a pretrained masked LM, and `build`, which makes either kind.

Knows ModernBERT as `transformers` writes it; must not know of schedules, strategies or text.
Letters as in `model.py`. `transformers` is imported only when a backbone is asked for.

What is relied on from transformers (5.17 to 5.22), beyond its public loading calls:
`ModernBertForMaskedLM` holds `model.embeddings.tok_embeddings`, `model.embeddings.norm`,
`model.layers`, `model.final_norm`, `head` and `decoder.bias`; a layer holds `attn_norm`, `attn`,
`mlp_norm` and `mlp`, and is x + attn(attn_norm(x)), then x + mlp(mlp_norm(x)); `attn` takes
`position_embeddings=(cos, sin)` of shape (1, T, D/H) with the two halves of a head alike, and, as
`sdpa`, a boolean `attention_mask`. Rotary angles and windows are computed here, not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unembed.config import Freeze, ModelConfig
from unembed.errors import UnembedError, unknown_name
from unembed.model import Denoiser, Modulation, Projection, parameter_counts

if TYPE_CHECKING:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

# The sizes that a backbone and the settings must share: ours, and ModernBERT's name for each.
_SIZES = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "vocab_size": "vocab_size",
}
# What `build(pretrained=False)` takes for granted, since no setting of ours says it.
_FIXED = (
    "norm_eps", "norm_bias", "attention_bias", "mlp_bias", "decoder_bias", "classifier_bias",
    "hidden_activation", "classifier_activation", "tie_word_embeddings",
)  # fmt: skip
# mmBERT's own: both kinds of layer turn with theta 160,000; every third layer attends globally.
_THETA, _WINDOW, _GLOBAL_EVERY = 160_000.0, 128, 3
# The one that takes a boolean mask, which is what `_positions` makes.
_ATTENTION = "sdpa"
# A window wider than any text: how a global layer is written among local ones.
_EVERYWHERE = 2**31 - 1


class PretrainedBlock(nn.Module):
    """One ModernBERT layer with its own norms, each sub-layer with scale, shift and gate."""

    def __init__(self, config: ModelConfig, layer: Any) -> None:
        """Take the parts of a `transformers` layer and add the modulation."""
        super().__init__()
        self.modulation = Modulation(config, 6)
        self.attn_norm = layer.attn_norm  # the identity in layer 0: the embeddings are normalised
        self.attn = layer.attn
        self.mlp_norm = layer.mlp_norm
        self.mlp = layer.mlp

    def forward(
        self, x: Tensor, known: Tensor, t: Tensor | None, *, turn: tuple[Tensor, Tensor], near: Tensor
    ) -> Tensor:
        """Update the residual stream x (B, T, D), turning places by `turn`, seeing only those `near`."""
        scale1, shift1, gate1, scale2, shift2, gate2 = self.modulation.split(known, t)
        h = (1 + scale1) * self.attn_norm(x) + shift1
        x = x + (1 + gate1) * self.attn(h, position_embeddings=turn, attention_mask=near)[0]
        return x + (1 + gate2) * self.mlp((1 + scale2) * self.mlp_norm(x) + shift2)


class PretrainedDenoiser(nn.Module):
    """p(x0 | xt, e) with the interface of `model.Denoiser`; untrained, it is the masked LM itself."""

    thetas: Tensor
    windows: Tensor

    def __init__(self, config: ModelConfig, lm: ModernBertForMaskedLM) -> None:
        """Take over the parts of `lm`, its first `config.layers` layers, and add the conditioning."""
        super().__init__()
        self.config = config
        self.projection = Projection(config.embedding_size, config.hidden)
        for linear in (self.projection.w1, self.projection.w2):  # as in the Denoiser
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        body = lm.model
        self.tokens = body.embeddings.tok_embeddings
        self.tokens.padding_idx = None  # padding is an ordinary target here, and learns as one
        # In an all-masked row every value vector is the same, so rotary positions alone would give
        # every place the same prediction. Zero at first: the masked LM has no such positions.
        self.places = nn.Parameter(torch.zeros(config.max_tokens, config.hidden))
        self.norm = body.embeddings.norm
        self.blocks = nn.ModuleList(PretrainedBlock(config, layer) for layer in body.layers[: config.layers])
        self.final_norm = body.final_norm
        self.modulation = Modulation(config, 3)
        self.prediction = lm.head
        self.bias = lm.decoder.bias
        # Part of the state, so that a checkpoint of any ModernBERT is read back as what it was;
        # whole numbers, so that no change of precision touches them.
        thetas, windows = _geometry(lm.config, config.layers)
        self.register_buffer("thetas", torch.tensor(thetas))
        self.register_buffer("windows", torch.tensor(windows))

    def condition(self, e: Tensor, *, drop: Tensor | None = None) -> tuple[Tensor, ...]:
        """All that the vectors decide, as in the Denoiser."""
        c = self.projection(e, drop)
        return tuple(part.modulation.of(c) for part in (*self.blocks, self))

    def hidden(
        self,
        xt: Tensor,
        e: Tensor,
        *,
        t: Tensor | None = None,
        drop: Tensor | None = None,
        condition: tuple[Tensor, ...] | None = None,
    ) -> Tensor:
        """Run the trunk and the LM's prediction head: (B, T, D), ready for `head`."""
        condition = self.condition(e, drop=drop) if condition is None else condition
        x = self.norm(self.tokens(xt) + self.places[: xt.shape[1]])
        cos, sin, near = self._positions(xt.shape[1])
        for i, block in enumerate(self.blocks):
            x = block(x, condition[i], t, turn=(cos[i], sin[i]), near=near[i])
        scale, shift, gate = self.modulation.split(condition[-1], t)
        return (1 + gate) * self.prediction((1 + scale) * self.final_norm(x) + shift)

    def _positions(self, T: int) -> tuple[Tensor, Tensor, Tensor]:
        """Cosines and sines (L, 1, T, D/H) and who may see whom (L, 1, 1, T, T), for each layer."""
        size = self.config.hidden // self.config.heads
        device = self.thetas.device
        place = torch.arange(T, device=device)
        power = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
        speed = 1 / self.thetas[:, None].float() ** power  # (L, D/2H)
        angle = (place[:, None] * speed[:, None]).repeat(1, 1, 2)[:, None]  # (L, 1, T, D/H)
        distance = (place[:, None] - place).abs()
        return angle.cos(), angle.sin(), (distance <= self.windows[:, None, None])[:, None, None]

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
        logits = F.linear(h, self.tokens.weight, self.bias)
        return logits.index_fill(-1, torch.full((), self.config.mask_id, device=h.device), float("-inf"))

    def forward(
        self,
        xt: Tensor,
        e: Tensor,
        *,
        t: Tensor | None = None,
        drop: Tensor | None = None,
        where: Tensor | None = None,
    ) -> Tensor:
        """Predict the clean tokens of xt (B, T) given vectors e (B, E), as `Denoiser.forward` does."""
        h = self.hidden(xt, e, t=t, drop=drop)
        return self.head(h if where is None else h[where])


def build(config: ModelConfig, *, pretrained: bool = True) -> Denoiser | PretrainedDenoiser:
    """Make the model that the settings describe, frozen as they say.

    Args:
        config: With an empty `backbone` a fresh `Denoiser`, else a wrapper around that masked LM.
        pretrained: Load the backbone's weights from the hub or a folder; False builds the
            architecture from `config` alone, touching neither, for weights that come later.
    """
    if config.freeze == "backbone" and pretrained and not config.backbone:
        raise UnembedError(
            "freeze backbone keeps what is pretrained, and this model begins with nothing such; name a "
            "masked LM with --backbone or a model with --start-from, or choose --freeze none or embeddings."
        )
    # mmBERT's 256,000 tokens hold its mask (id 4), so no row is ever added to a vocabulary.
    for name in ("mask_id", "end_id", "pad_id"):
        if (value := getattr(config, name)) >= config.vocab_size:
            raise UnembedError(
                f"{name} {value} is outside the vocabulary of {config.vocab_size}; ids start at 0."
            )
    model: Denoiser | PretrainedDenoiser
    if not config.backbone:
        model = Denoiser(config)
    else:
        model = PretrainedDenoiser(config, _load(config) if pretrained else _fresh(config))
    freeze(model, config.freeze)
    return model


def freeze(model: Denoiser | PretrainedDenoiser, mode: Freeze) -> None:
    """Set which parameters learn.

    `none`: all. `embeddings`: all but the vocabulary's end on both sides, that is the token
    embedding, which is the output's too, its bias and the LM's prediction head. `backbone`: only
    the projection, the modulations, the places and what guesses vectors, which a masked LM does not bring.
    """
    if mode not in get_args(Freeze):
        raise unknown_name("freeze", str(mode), get_args(Freeze))
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        ours = parts[0] in ("projection", "places", "vector", "whole") or "modulation" in parts
        vocabulary = parts[0] in ("tokens", "prediction", "bias")
        frozen = (mode == "embeddings" and vocabulary) or (mode == "backbone" and not ours)
        parameter.requires_grad_(not frozen)


@dataclass(frozen=True)
class Counts:
    """Parameters of a model, each tensor counted once."""

    total: int
    trainable: int


def count(config: ModelConfig) -> Counts:
    """Count the parameters that `config` describes, without making them."""
    with torch.device("meta"):
        return Counts(*parameter_counts(build(config, pretrained=False)))


def _geometry(lm_config: ModernBertConfig, layers: int) -> tuple[list[int], list[int]]:
    """Rotary theta of each layer, and how far to either side it sees."""
    kinds = list(lm_config.layer_types or [])[:layers]
    ropes: dict[str, dict[str, Any]] = dict(lm_config.rope_parameters or {})  # type: ignore[arg-type]
    local = lm_config.local_attention // 2
    thetas = [int(ropes[kind]["rope_theta"]) for kind in kinds]
    return thetas, [local if kind == "sliding_attention" else _EVERYWHERE for kind in kinds]


def _architecture(config: ModelConfig) -> ModernBertConfig:
    """Describe the ModernBERT of these settings, with mmBERT's values for what they do not say."""
    try:
        from transformers import ModernBertConfig
    except ImportError as error:
        raise UnembedError(
            "a pretrained backbone needs transformers; pip install 'unembed[encoders]'."
        ) from error
    if config.hidden % config.heads or config.hidden // config.heads % 2:
        raise UnembedError(
            f"hidden {config.hidden} with heads {config.heads} does not give heads of an even width; "
            "take both from the backbone."
        )
    rope = {"rope_type": "default", "rope_theta": _THETA}
    local = [bool(i % _GLOBAL_EVERY) for i in range(config.layers)]
    return ModernBertConfig(
        hidden_size=config.hidden,
        intermediate_size=config.ffn,
        num_attention_heads=config.heads,
        num_hidden_layers=config.layers,
        vocab_size=config.vocab_size,
        layer_types=["sliding_attention" if here else "full_attention" for here in local],
        local_attention=_WINDOW,
        rope_parameters={"full_attention": dict(rope), "sliding_attention": dict(rope)},
        pad_token_id=config.pad_id,
        bos_token_id=None,
        eos_token_id=None,
        cls_token_id=None,
        sep_token_id=None,
    )


def _fresh(config: ModelConfig) -> ModernBertForMaskedLM:
    """Build the masked LM with random weights."""
    architecture = _architecture(config)
    from transformers import AutoModelForMaskedLM

    return AutoModelForMaskedLM.from_config(architecture, attn_implementation=_ATTENTION)


def _load(config: ModelConfig) -> ModernBertForMaskedLM:
    """Load the masked LM by hub name or from a folder, once its description fits the settings."""
    expected = _architecture(config)
    from safetensors import SafetensorError
    from transformers import AutoConfig, ModernBertForMaskedLM

    name = config.backbone
    try:
        found = AutoConfig.from_pretrained(name, trust_remote_code=False)
        _compare(found, expected, config)
        loaded: Any = ModernBertForMaskedLM.from_pretrained(
            name,
            dtype=torch.float32,
            attn_implementation=_ATTENTION,
            use_safetensors=True,  # a pickle may run code
            output_loading_info=True,
        )
    except UnembedError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        if Path(name).is_dir():
            said = f"folder {name} holds no masked LM that can be read"
            advice = "it needs config.json and model.safetensors (pickled weights are not read)"
        else:
            said = f"backbone {name} is no folder here and could not be fetched from the hub"
            advice = "check the name and the connection, or give the path of a downloaded copy"
        cause = " ".join(str(error).split()).split(". ")[0].rstrip(".")
        raise UnembedError(f"{said} ({cause}); {advice}.") from error
    lm, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise UnembedError(
            f"backbone {name} is not a whole masked LM: {missing[0]} is missing; "
            "choose a checkpoint that was saved with its prediction head."
        )
    return lm


def _compare(found: Any, expected: ModernBertConfig, config: ModelConfig) -> None:
    """Raise unless the backbone is a ModernBERT of the sizes that the settings name."""
    name = config.backbone
    if found.model_type != "modernbert":
        raise UnembedError(
            f"backbone {name} is of type {found.model_type}, not modernbert; "
            "choose a ModernBERT such as jhu-clsp/mmBERT-base."
        )
    for ours, theirs in _SIZES.items():
        if getattr(found, theirs) != getattr(config, ours):
            raise UnembedError(
                f"backbone {name} has {theirs} {getattr(found, theirs)}, but {ours} is "
                f"{getattr(config, ours)}; set {ours} to the backbone's."
            )
    if found.num_hidden_layers < config.layers:
        raise UnembedError(
            f"backbone {name} has {found.num_hidden_layers} layers, but layers is {config.layers}; "
            "choose at most as many as it has."
        )
    own_mask = getattr(found, "mask_token_id", None)
    if own_mask is not None and own_mask != config.mask_id:
        raise UnembedError(
            f"backbone {name} has mask token {own_mask}, but mask_id is {config.mask_id}; "
            "set mask_id to the backbone's."
        )
    for key in _FIXED:
        if getattr(found, key) != getattr(expected, key):
            raise UnembedError(
                f"backbone {name} has {key} {getattr(found, key)}, but only "
                f"{getattr(expected, key)} is supported; choose another ModernBERT."
            )
    for kind, rope in found.rope_parameters.items():
        if rope["rope_type"] != "default" or rope["rope_theta"] != int(rope["rope_theta"]):
            raise UnembedError(
                f"backbone {name} has rotary positions {rope} in {kind}, but only the default type "
                "with a whole theta is supported; choose another ModernBERT."
            )

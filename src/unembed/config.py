"""Every setting of a model and of a training run, the presets, and their JSON form.

Knows names and numbers only: no torch, no files but the JSON it reads. The `help` of a
field is the help of its option on the command line.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints

from unembed.errors import UnembedError, unknown_name

Positions = Literal["learned", "rotary"]
Schedule = Literal["linear", "exponential", "cosine", "fixed"]
Weight = Literal["mean", "elbo", "inverse-t"]
Freeze = Literal["none", "embeddings", "backbone"]
Optimizer = Literal["adamw", "muon"]
Decay = Literal["constant", "linear", "cosine"]
Precision = Literal["auto", "fp32", "bf16"]
Pairs = Literal["cached", "fresh"]


def _setting(default: Any, help: str, *, low: float | None = None, high: float | None = None) -> Any:
    """Declare a field with its help and, for numbers, the range it must lie in."""
    return field(default=default, metadata={"help": help, "low": low, "high": high})


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the conditional denoiser."""

    layers: int = _setting(12, "transformer layers", low=1)
    hidden: int = _setting(512, "width of the residual stream", low=8)
    heads: int = _setting(8, "attention heads", low=1)
    ffn: int = _setting(2048, "width of the feed-forward layer", low=8)
    max_tokens: int = _setting(32, "longest text, in tokens", low=1)
    vocab_size: int = _setting(30522, "tokens of the vocabulary, the mask included", low=2)
    mask_id: int = _setting(103, "id of the mask token", low=0)
    end_id: int = _setting(102, "id of the end-of-text token", low=0)
    pad_id: int = _setting(0, "id of the padding token", low=0)
    embedding_size: int = _setting(384, "size of the vectors to invert", low=1)
    positions: Positions = _setting("rotary", "learned alone, or with rotary ones in the attention")
    adaln_rank: int = _setting(128, "rank of each layer's AdaLN map; 0 for a full matrix", low=0)
    adaln_diagonal: bool = _setting(False, "add a diagonal to each layer's AdaLN map of low rank")
    time_conditioning: bool = _setting(False, "tell the model the time t (MDLM leaves it out)")
    dropout: float = _setting(
        0.0, "share of what each sub-layer adds that is left out in training", low=0.0, high=0.9
    )
    causal: bool = _setting(False, "can also read left to right, one token after the other")
    embeds: bool = _setting(False, "can also guess the vector of a whole text, to check what it wrote")
    backbone: str = _setting("", "pretrained masked LM to build on, by hub name or path")
    freeze: Freeze = _setting("none", "what stays as pretrained")


@dataclass(frozen=True)
class DiffusionConfig:
    """The forward process and the loss."""

    schedule: Schedule = _setting("linear", "survival probability alpha_t")
    rate: float = _setting(5.0, "lambda of the exponential schedule", low=0.01)
    mask_ratio: float = _setting(0.5, "share of masked tokens of the fixed schedule", low=0.01, high=1.0)
    weight: Weight = _setting("mean", "weight of a masked token in the loss")
    stratified: bool = _setting(True, "draw one t from each stratum of the batch")
    lowest_t: float = _setting(
        0.0, "least t that is drawn; above 0, more tokens carry loss", low=0.0, high=1.0
    )
    suffix_share: float = _setting(
        0.0, "share of rows masked as a suffix instead of at random", low=0.0, high=1.0
    )
    causal_share: float = _setting(
        0.0, "share of rows trained left to right: every token a target, told only what stands before it",
        low=0.0, high=1.0,
    )  # fmt: skip
    causal_hidden: float = _setting(
        0.0, "share of tokens that rows trained left to right hide from what follows; they stay targets",
        low=0.0, high=1.0,
    )  # fmt: skip
    embed_share: float = _setting(
        0.0, "share of rows that teach what vector a whole text has, which is not told", low=0.0, high=1.0
    )
    condition_dropout: float = _setting(
        0.1, "share of rows trained without their vector, for guidance", low=0.0, high=1.0
    )


@dataclass(frozen=True)
class TrainConfig:
    """The optimisation."""

    pairs: Pairs = _setting("cached", "vectors from disk, or random spans embedded while training")
    splice_share: float = _setting(
        0.0, "share of fresh spans joined from pieces of two passages, so that none is learnt by heart",
        low=0.0, high=1.0,
    )  # fmt: skip
    swap_share: float = _setting(
        0.0, "share of fresh spans in which some words are swapped for any others, to be read, not guessed",
        low=0.0, high=1.0,
    )  # fmt: skip
    rare_share: float = _setting(
        0.0, "share of fresh spans whose passages are drawn by how rare their words are", low=0.0, high=1.0
    )  # fmt: skip
    reword_share: float = _setting(
        0.0, "share of fresh spans in which the model itself writes some words anew, untold the vector",
        low=0.0, high=1.0,
    )  # fmt: skip
    practice_share: float = _setting(
        0.0, "share of the rows whose vectors the model also writes texts for, to learn from the better ones",
        low=0.0, high=1.0,
    )  # fmt: skip
    practice_weight: float = _setting(
        20.0, "weight, against a token's cross entropy, of what makes better texts likelier", low=0.0
    )
    batch_size: int = _setting(400, "passages a step, over all processes", low=1)
    steps: int = _setting(200_000, "steps of the whole run", low=1)
    optimizer: Optimizer = _setting("adamw", "adamw, or muon for the matrices inside the blocks")
    learning_rate: float = _setting(1e-4, "peak rate of adamw", low=0.0)
    muon_rate: float = _setting(2e-3, "peak rate of muon", low=0.0)
    bag_weight: float = _setting(
        0.0, "weight of a second loss: the text's tokens, in any order, from the projected vector", low=0.0
    )
    embed_weight: float = _setting(
        10.0,
        "weight, against a full text's cross entropy, of how far a guessed vector is from the text's",
        low=0.0,
    )
    weight_decay: float = _setting(0.01, "decoupled weight decay of matrices", low=0.0)
    warmup: int = _setting(2_000, "steps of linear warm-up", low=0)
    decay: Decay = _setting("constant", "shape of the rate after warm-up")
    decay_start: float = _setting(0.5, "share of the run after which the rate falls", low=0.0, high=1.0)
    clip: float = _setting(1.0, "largest gradient norm; 0 for no clipping", low=0.0)
    ema: float = _setting(0.9999, "decay of the averaged weights, warmed up", low=0.0, high=1.0)
    precision: Precision = _setting("auto", "bf16 where the device has it, else fp32")
    compile: bool = _setting(False, "compile the model (pays on a GPU, for long runs)")
    seed: int = _setting(0, "seed of weights, order, masks, spans and dropout", low=0, high=2**63 - 1)
    validation: int = _setting(1_000, "passages kept aside for validation", low=0)
    evaluate_every: int = _setting(500, "steps between validations", low=1)
    save_every: int = _setting(500, "steps between saved states", low=1)
    patience: int = _setting(0, "validations without a better loss before stopping; 0 never", low=0)
    minutes: float = _setting(0.0, "end the run after so many minutes; 0 for no limit", low=0.0)


@dataclass(frozen=True)
class Config:
    """A model, how it is trained, and the encoder it inverts."""

    encoder: str = "all-MiniLM-L6-v2"
    model: ModelConfig = field(default_factory=ModelConfig)
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        """Check every value, so that a bad one is named before any work is done."""
        for section in (self.model, self.diffusion, self.train):
            _check(section)
        if not self.model.backbone and self.model.hidden % self.model.heads:
            raise UnembedError(
                f"hidden {self.model.hidden} is not a multiple of heads {self.model.heads}; "
                "choose a number of heads that divides the width."
            )
        if self.diffusion.causal_share and not self.model.causal:
            raise UnembedError(
                f"causal_share {self.diffusion.causal_share} needs a model that reads left to right; "
                "set causal, or causal_share to 0."
            )
        if self.train.practice_share and not self.model.causal:
            raise UnembedError(
                f"practice_share {self.train.practice_share} needs a model that reads left to right; "
                "set causal, or practice_share to 0."
            )
        if self.diffusion.embed_share and not self.model.embeds:
            raise UnembedError(
                f"embed_share {self.diffusion.embed_share} needs a model that guesses vectors; "
                "set embeds, or embed_share to 0."
            )
        if self.diffusion.causal_share + self.diffusion.embed_share > 1:
            raise UnembedError(
                f"causal_share {self.diffusion.causal_share} and embed_share {self.diffusion.embed_share} "
                "are more than all rows; lower one of them."
            )
        if self.model.embeds and self.model.backbone:
            raise UnembedError(f"the backbone {self.model.backbone} guesses no vectors; leave embeds out.")
        if self.model.causal and self.model.backbone:
            raise UnembedError(
                f"the backbone {self.model.backbone} reads in both directions; leave causal out."
            )
        if self.model.dropout and self.model.backbone:
            raise UnembedError(
                f"the backbone {self.model.backbone} is trained without dropout; leave dropout out."
            )

    def override(self, **values: Any) -> Config:
        """Return a copy with some fields changed, wherever they stand; None leaves a field.

        >>> Config().override(layers=2, steps=10).model.layers
        2
        """
        sections: dict[str, Any] = {"encoder": values.pop("encoder", None) or self.encoder}
        for name in ("model", "diffusion", "train"):
            section = getattr(self, name)
            own = {f.name for f in dataclasses.fields(section)}
            given = {k: values.pop(k) for k in list(values) if k in own}
            given = {k: v for k, v in given.items() if v is not None}
            sections[name] = dataclasses.replace(section, **given)
        if values:
            raise unknown_name("setting", next(iter(values)), sorted(setting_names()))
        return Config(**sections)

    def to_json(self) -> str:
        """Write the configuration as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> Config:
        """Read what `to_json` wrote; unknown or ill-typed fields are errors."""
        try:
            raw = json.loads(text)
            sections = {"model": ModelConfig, "diffusion": DiffusionConfig, "train": TrainConfig}
            built = {name: kind(**raw.get(name, {})) for name, kind in sections.items()}
            return Config(encoder=raw["encoder"], **built)
        except (json.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
            raise UnembedError(
                f"this is not an unembed configuration ({error}); expected the JSON that unembed writes."
            ) from error


def _check(section: Any) -> None:
    """Raise on a field of the wrong type, outside its choices or outside its range."""
    hints = get_type_hints(type(section))
    for f in dataclasses.fields(section):
        value, kind = getattr(section, f.name), hints[f.name]
        if choices := get_args(kind):
            if value not in choices:
                raise unknown_name(f.name.replace("_", "-"), str(value), choices)
            continue
        numeric = kind is float and isinstance(value, int) and not isinstance(value, bool)
        if not (isinstance(value, kind) or numeric) or (kind is int and isinstance(value, bool)):
            raise UnembedError(f"{f.name} must be {kind.__name__}, not {value!r}.")
        low, high = f.metadata.get("low"), f.metadata.get("high")
        if isinstance(value, float) and not math.isfinite(value):
            raise UnembedError(f"{f.name} must be a finite number, not {value}.")
        if (low is not None and value < low) or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"between {low} and {high}"
            raise UnembedError(f"{f.name} must be {bounds}, not {value}.")


def setting_names() -> list[str]:
    """Name every field that `Config.override` takes."""
    sections = (ModelConfig, DiffusionConfig, TrainConfig)
    return ["encoder", *(f.name for section in sections for f in dataclasses.fields(section))]


def preset(name: str) -> Config:
    """Return the preset of that name."""
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    return PRESETS[name]


# The paper's diffusion: alpha_t = exp(-5t), weight 1/t, independent t (section 3.2).
_PAPER = DiffusionConfig(schedule="exponential", weight="inverse-t", stratified=False)
# mmBERT-base is a ModernBERT: hidden 768, GLU 1152; its vocabulary holds a mask token.
_MMBERT = ModelConfig(
    layers=22,
    hidden=768,
    heads=12,
    ffn=1152,
    vocab_size=256_000,
    mask_id=4,
    end_id=1,
    pad_id=0,
    embedding_size=1024,
    positions="rotary",
    adaln_rank=0,
    time_conditioning=True,
    backbone="jhu-clsp/mmBERT-base",
)
_JINA = "jina-embeddings-v3"

PRESETS: dict[str, Config] = {
    # For tests and the demo: learns a few hundred sentences by heart in a minute on two cores. The
    # vocabulary is most of a step's cost, so width and batch are small; muon makes up for it.
    "tiny": Config(
        model=ModelConfig(layers=3, hidden=128, heads=2, ffn=512, adaln_rank=0),
        train=TrainConfig(
            batch_size=16,
            steps=600,
            optimizer="muon",
            learning_rate=3e-3,
            muon_rate=2e-2,
            warmup=20,
            decay="linear",
            ema=0.99,
            validation=0,
            evaluate_every=100,
            save_every=200,
        ),
    ),
    # The bundled model: what won at equal GPU minutes (docs/log.md), under 64 MB in int8.
    "small": Config(
        model=ModelConfig(
            layers=8,
            hidden=640,
            heads=10,
            ffn=2560,
            adaln_rank=88,
            adaln_diagonal=True,
            causal=True,
            embeds=True,
        ),
        diffusion=DiffusionConfig(lowest_t=0.15, causal_share=0.65, embed_share=0.15, condition_dropout=0.05),
        train=TrainConfig(
            pairs="fresh",
            splice_share=0.15,
            swap_share=0.3,
            rare_share=0.5,
            reword_share=0.5,
            batch_size=1024,
            steps=100_000,
            optimizer="muon",
            learning_rate=1e-3,
            bag_weight=0.2,
            warmup=300,
            decay="linear",
            ema=0.999,
            compile=True,
            validation=2_000,
            evaluate_every=2_500,
            save_every=5_000,
        ),
    ),
    # The paper's main experiments: 8 layers from scratch, the encoder's own vocabulary.
    "scratch-8": Config(
        encoder=_JINA,
        model=ModelConfig(
            layers=8,
            hidden=768,
            heads=12,
            ffn=3072,
            vocab_size=250_002,
            mask_id=250_001,
            end_id=2,
            pad_id=1,
            embedding_size=1024,
            positions="learned",
            adaln_rank=0,
            time_conditioning=True,
        ),
        diffusion=_PAPER,
    ),
    "mmbert-22": Config(encoder=_JINA, model=_MMBERT, diffusion=_PAPER),
    "mmbert-8": Config(encoder=_JINA, model=dataclasses.replace(_MMBERT, layers=8), diffusion=_PAPER),
    "mmbert-2": Config(encoder=_JINA, model=dataclasses.replace(_MMBERT, layers=2), diffusion=_PAPER),
}

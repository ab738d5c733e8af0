"""What goes over the wire: the bodies that are taken and the answers that are given.

Types, bounds and examples, from which the OpenAPI page is made; must not know how they are answered.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from unembed.beam import BEAMS, LOOKS, MOST_BEAMS, MOST_LOOKS
from unembed.decode import MOST_DRAFTS, DecodeOptions
from unembed.results import Step
from unembed.strategies import AUTO, STRATEGIES, RevealSchedule

# Beyond any embedding, and well within what float32 can square.
Number = Annotated[float, Field(ge=-1e6, le=1e6)]
Vector = Annotated[list[Number], Field(min_length=1, max_length=16_384)]
LARGEST_SEED = 2**53 - 1  # what every JSON reader holds exactly


class Message(BaseModel):
    """A body in which a misspelt field is an error, not ignored, and a number is one."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Decoding(Message):
    """How to get from a vector to a text; the names are those of `Inverter.invert`."""

    strategy: str = Field(AUTO, max_length=40, json_schema_extra={"enum": [AUTO, *STRATEGIES]})
    steps: int | None = Field(
        None, ge=1, le=512, description="Passes, from 1 to the model's number of tokens."
    )
    temperature: float | None = Field(None, ge=0, le=10, description="0: the likeliest tokens.")
    guidance: float = Field(1.0, ge=0, le=20, description="1: the model as it is.")
    seed: int | None = Field(None, ge=0, le=LARGEST_SEED, description="The same seed, the same text.")
    remask: float = Field(0.05, ge=0, le=1)
    restart: float = Field(0.5, ge=0, le=1)
    reveal: RevealSchedule = "linear"
    beams: int = Field(BEAMS, ge=1, le=MOST_BEAMS, description="Beginnings of a text that beam keeps.")
    drafts: int = Field(
        1,
        ge=1,
        le=MOST_DRAFTS,
        description="Texts drawn for a vector, of which one is chosen; not with beam.",
    )
    looks: int = Field(
        LOOKS, ge=0, le=MOST_LOOKS, description="How often beam looks where its beginnings lead."
    )

    def options(self) -> DecodeOptions:
        """What the decoding loop takes."""
        return DecodeOptions(
            self.strategy,
            self.steps,
            self.temperature,
            self.guidance,
            self.remask,
            self.restart,
            self.reveal,
            self.beams,
            self.drafts,
            self.looks,
        )


class InvertRequest(Decoding):
    """Vectors to turn into text."""

    vectors: list[Vector] = Field(min_length=1, max_length=1024)


class StreamRequest(Decoding):
    """One vector to turn into text, step by step, and then perhaps to search further."""

    vector: Vector
    rounds: int = Field(0, ge=0, le=1000, description="Rounds of search after the steps; 0 for none.")
    candidates: int = Field(16, ge=1, le=64, description="Texts tried in a round.")


class EncodeRequest(Message):
    """Texts to embed."""

    texts: list[str] = Field(min_length=1, max_length=1024)


class Recovered(BaseModel):
    """A text recovered from a vector."""

    text: str
    ids: list[int]
    pieces: list[str]
    confidences: list[float]
    likeness: float | None  # the model's own guess of the cosine, if it made one; no encoder is asked
    forward_passes: int


class InvertAnswer(BaseModel):
    """The recovered texts, and the seed that gives them again."""

    inversions: list[Recovered]
    strategy: str
    seed: int


class Encoded(BaseModel):
    """A text as cut to the model's length, its tokens and its vector."""

    text: str
    truncated: bool
    ids: list[int]
    pieces: list[str]
    vector: list[float]


class EncodeAnswer(BaseModel):
    """The embedded texts."""

    encodings: list[Encoded]


class StrategyInfo(BaseModel):
    """A way to decode."""

    name: str
    summary: str
    temperature: float


class LimitsInfo(BaseModel):
    """How much may be asked for."""

    vectors: int
    text_length: int
    steps: int
    rounds: int
    body_bytes: int
    seconds: float


class ModelInfo(BaseModel):
    """A model and what it can do."""

    name: str
    encoder: str
    embedding_size: int
    max_tokens: int
    can_encode: bool
    strategies: list[StrategyInfo]
    limits: LimitsInfo


class ModelsAnswer(BaseModel):
    """The models this server has."""

    models: list[ModelInfo]


class ErrorAnswer(BaseModel):
    """What went wrong, in a sentence."""

    error: str


class StepEvent(BaseModel):
    """A draft after a step; a piece is null while it is masked."""

    index: int
    total: int
    ids: list[int]
    pieces: list[str | None]
    confidences: list[float]
    text: str

    @classmethod
    def of(cls, step: Step, *, mask_id: int) -> StepEvent:
        """Tell masks from a literal underscore."""
        pieces = [None if i == mask_id else p for i, p in zip(step.ids, step.pieces, strict=True)]
        return cls(
            index=step.index,
            total=step.total,
            ids=step.ids,
            pieces=pieces,
            confidences=[round(each, 4) for each in step.confidences],
            text=step.text,
        )


class RoundEvent(BaseModel):
    """Where a search stands after a round; round 0 is the drafts."""

    index: int
    total: int
    text: str
    cosine: float
    encoder_calls: int
    exact: bool
    pool: list[tuple[str, float]]


class DoneEvent(BaseModel):
    """The end of a stream."""

    text: str
    ids: list[int]
    cosine: float | None  # None where the server has no encoder
    likeness: float | None  # the model's own guess of it, if it made one; None after a search
    forward_passes: int  # of the steps; a search makes more
    encoder_calls: int  # of a search
    strategy: str
    seed: int
    seconds: float

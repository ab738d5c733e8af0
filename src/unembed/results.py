"""What an inverter gives: texts, steps of decoding, rounds of a search, comparisons.

Plain data; knows nothing of how it came about.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Inversion:
    """A text recovered from a vector."""

    text: str
    ids: list[int]
    confidences: list[float]  # of each token, recorded when it was chosen
    strategy: str
    forward_passes: int  # rows that went through the model; with a search, those of all candidates
    cosine: float | None = None  # between the vector and this text's, if an encoder was asked
    likeness: float | None = None  # the model's own guess of that, no encoder asked; None if it made none
    encoder_calls: int = 0  # texts embedded to find this one
    exact: bool | None = None  # whether the cosine leaves no doubt that this is the text
    ranked_by: str | None = None  # the encoder that was asked


@dataclass(frozen=True)
class Step:
    """One vector's draft after a step of decoding."""

    index: int  # from 1
    total: int
    ids: list[int]
    pieces: list[str]  # each token as people read it; "_" where masked
    confidences: list[float]
    text: str  # what is revealed so far
    likeness: float | None = None  # after the last step, as in `Inversion`


@dataclass(frozen=True)
class MoveCount:
    """What became of the candidates that one move made in one round."""

    tries: int  # embedded
    entered: int  # came into the pool
    improved: int  # were better than any text of the rounds before


@dataclass(frozen=True)
class Round:
    """Where the search for one text stands after a round."""

    index: int  # 0 after the drafts
    total: int  # rounds, if none is the last before
    text: str  # the best so far
    cosine: float
    encoder_calls: int
    pool: list[tuple[str, float]]  # distinct texts and their cosines, the best first
    moves: dict[str, MoveCount]  # of this round
    exact: bool  # whether the cosine leaves no doubt that this is the text


@dataclass(frozen=True)
class Reconstruction:
    """A text, what came back of it, and how close the two are to the encoder."""

    original: str  # as cut to the model's length
    inversion: Inversion
    cosine: float

    @property
    def text(self) -> str:
        """The recovered text."""
        return self.inversion.text

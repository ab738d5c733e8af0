"""Options that several commands share, and the models and encoders they name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from unembed.cli.terminal import FLAG, STDIN, waiting
from unembed.errors import UnembedError
from unembed.whole import hindrance

if TYPE_CHECKING:
    from unembed.encoders import Encoder
    from unembed.inverter import Inverter


def at_least_one(_: Any, count: int | None) -> None:
    """Refuse a count below one while the command line is read."""
    if count is not None and count < 1:
        raise ValueError(f"must be at least 1, not {count}.")


def writable_file(_: Any, path: Path | None) -> None:
    """Refuse a file that cannot be written while the command line is read, and not after the work."""
    if path is not None and str(path) != STDIN and (reason := hindrance(path)):
        raise ValueError(f"must be a file that can be written, not {path} ({reason}).")


def writable_folder(_: Any, path: Path) -> None:
    """Refuse what can be no folder likewise."""
    reason = "it is standard output" if str(path) == STDIN else hindrance(path, folder=True)
    if reason:
        shown = "-" if str(path) == STDIN else path
        raise ValueError(f"must be a folder that can be written to, not {shown} ({reason}).")


DECODING = Group("Decoding", sort_key=2)
SEARCH = Group("Search", sort_key=3)
Field = Annotated[str, Parameter(help="Field of JSON lines, or column of Parquet, that holds the text.")]
Trust = Annotated[
    bool, FLAG, Parameter(name="--trust-remote-code", help="Run code that comes with the encoder.")
]
Device = Annotated[str | None, Parameter(help="cpu, cuda, cuda:1, mps; the best there is by default.")]
BatchSize = Annotated[int, Parameter(help="How many go through the model together.", validator=at_least_one)]
Model = Annotated[
    str | None,
    Parameter(help="A bundled model, the folder of a trained one, or a hub id; the bundled one by default."),
]
EncoderName = Annotated[
    str | None,
    Parameter(help="Another encoder than the model's own: a name, folder, hub id or http address#model."),
]

# The strategies that an option of decoding means something to; auto may turn out to be one of them.
CONCERNS = {
    "remask": ("euler-remask",),
    "restart": ("two-stage",),
    "reveal": ("confidence", "auto"),
    "beams": ("beam", "auto"),
    "looks": ("beam", "auto"),
}


@Parameter(name="*", group=DECODING)
@dataclass(frozen=True)
class Decoding:
    """How to get from a vector to a text.

    Attributes:
        strategy: One of `unembed strategies`, or auto: the model's best that takes the --steps you give.
        steps: Passes through the model, from 1 to its length in tokens; the strategy's own by default.
        temperature: 0 takes the likeliest tokens; the strategy's own by default.
        guidance: 1 is the model as it is; more leans harder on the vector, at two passes a step.
        seed: The same seed gives the same text.
        remask: Share of tokens that euler-remask masks again after a step.
        restart: Time t0 to which two-stage noises its first text.
        reveal: Pace of confidence, linear or cosine.
        beams: Beginnings of a text that beam keeps, from 1 to 128.
        looks: How often beam looks where its beginnings lead, from 0 to 8.
        drafts: Texts drawn for a vector, of which one is chosen, from 1 to 64; not with beam.
    """

    strategy: str = "auto"
    steps: int | None = None
    temperature: float | None = None
    guidance: float = 1.0
    seed: int | None = None
    remask: float = 0.05
    restart: float = 0.5
    reveal: str = "linear"
    beams: int = 32
    looks: int = 4
    drafts: int = 1

    def check(self) -> None:
        """Name a bad value before any model is loaded."""
        from unembed.decode import DecodeOptions

        DecodeOptions(**{key: value for key, value in asdict(self).items() if key != "seed"})
        for name in CONCERNS:
            if getattr(self, name) != getattr(Decoding, name):
                check_concern(name, [self.strategy])
        if self.steps is not None and self.steps < 1:
            raise UnembedError(f"steps must be at least 1, not {self.steps}.")
        if self.seed is not None and self.seed < 0:
            raise UnembedError(f"seed must be 0 or more, not {self.seed}.")

    def options(self) -> dict[str, Any]:
        """The keyword arguments of `Inverter.invert`."""
        return asdict(self)


@Parameter(name="*", group=SEARCH)
@dataclass(frozen=True)
class Search:
    """How to go on from the first draft, with the encoder in the loop.

    Attributes:
        refine: encoder searches for a text whose embedding is the vector; self and distilled guess that.
        rounds: Rounds of the search; a text that is found leaves it earlier.
        candidates: New texts a round.
        pool: Texts kept from round to round.
        budget: Most texts that may be embedded to find one; no limit but the rounds' by default.
        distilled: Folder of a distilled encoder; the one that comes with the package by default.
    """

    refine: str | None = None
    rounds: int = 20
    candidates: int = 32
    pool: int = 8
    budget: int | None = None
    distilled: Path | None = None

    def check(self) -> None:
        """Name a bad value before any model is loaded."""
        from unembed.search import SearchOptions

        if self.distilled is not None and self.refine not in (None, "distilled"):
            raise UnembedError("--distilled goes with --refine distilled; change one, or leave it out.")
        if self.refine is not None:
            SearchOptions(**self.options())
            return
        for name, value in asdict(self).items():
            if value != getattr(Search, name):
                kind = "distilled" if name == "distilled" else "encoder"
                raise UnembedError(f"--{name} concerns a search; add --refine {kind}, or leave it out.")

    def options(self) -> dict[str, Any]:
        """The keyword arguments of `Inverter.invert`; the distilled encoder comes with the inverter."""
        values = asdict(self)
        del values["distilled"]
        return values if self.refine is not None else {}


def check_concern(name: str, strategies: Sequence[str]) -> None:
    """Refuse an option of decoding that would do nothing with any of these strategies."""
    if not set(strategies) & set(CONCERNS[name]):
        strategy = CONCERNS[name][0]
        raise UnembedError(f"--{name} concerns {strategy}; add --strategy {strategy}, or leave it out.")


def open_inverter(
    model: str | None, *, device: str | None, encoder: str | None = None, search: Search | None = None
) -> Inverter:
    """Load the model that was named, else the bundled one for the encoder; and whom its search asks."""
    with waiting("loading the model"):
        from unembed.checkpoint import bundled_models
        from unembed.inverter import DEFAULT_MODEL, Inverter

        bundled = bundled_models()
        name = model or (encoder if encoder in bundled else DEFAULT_MODEL)
        if model is None and name not in bundled:
            raise UnembedError(
                "no model comes with this version; train one with unembed prepare and unembed train, "
                "and give its folder: --model RUN/model."
            )
        inverter = Inverter.from_pretrained(name, device=device)
        # Now, because a search begins after the texts are embedded.
        if search is not None and search.refine == "distilled":
            inverter.distilled(search.distilled)
        if search is not None and search.refine == "self":
            inverter.guesses()
        return inverter


def open_encoder(name: str, *, device: str | None = None, trust: bool = False) -> Encoder:
    """Load an encoder by name."""
    with waiting(f"loading {name}"):
        from unembed.encoders import load_encoder
        from unembed.engine import find_device

        if device is not None:
            find_device(device)
        options = {"trust_remote_code": True} if trust else {}
        try:
            return load_encoder(name, device=device, **options)
        except UnembedError as error:
            said = str(error).replace("pass trust_remote_code=True", "add --trust-remote-code")
            raise UnembedError(said) from error


def encoder_of(inverter: Inverter, name: str | None, *, device: str | None, trust: bool) -> Encoder:
    """Load the encoder that was named, else the model's own."""
    return open_encoder(name or inverter.encoder_name, device=device or str(inverter.device), trust=trust)

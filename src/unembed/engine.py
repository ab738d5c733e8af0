"""A model as decoding runs it: where, with weights in half or in one byte, its trunk recorded on a GPU.

Knows devices, number formats and CUDA graphs. It must not know of strategies, steps or text; what it returns
has the interface of the model it was given.
"""

from __future__ import annotations

import copy
import ctypes
import os
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unembed.errors import UnembedError

# A recording costs about as much as five passes: it must come back often, and room is not endless.
_RECORD_AFTER, _RECORDINGS = 16, 32
_TINY = 1e-30  # stands for the largest of a row that is all zeros
# Numbers by which glibc's malloc.h names three of its settings, and what they are set to.
_MALLOC = {"trim threshold": (-1, 2**30), "mmap threshold": (-3, 2**30), "arenas": (-8, 1)}
# In whole numbers most of the time goes by in memory. What a CPU's caches hold: sums that become floats
# together, and places that go through the trunk together, enough of them to read its weights for.
_SUMS, _PLACES = 2**18, 512

Numbers = Literal["fp32", "bf16", "int8"]


def find_device(asked: str | torch.device | None) -> torch.device:
    """Return the device that was asked for, or a GPU if there is one; refuse one that is not there."""
    try:
        device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, TypeError) as error:
        raise UnembedError(f"unknown device {asked!r}; expected cpu, cuda, cuda:1 or mps.") from error
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (device.index or 0) >= counts.get(device.type, 0):
        raise UnembedError(f"there is no device {device} here; leave it out, or say cpu.")
    return device


def prepare(model: Any, numbers: Numbers) -> Any:
    """Make a model ready to decode in these numbers; its own weights stay as they are.

    On a GPU its trunk is recorded too. `int8` is for CPUs: see `fast_int8`.
    """
    made = {"fp32": lambda m: m, "bf16": HalfModel, "int8": Int8Model}[numbers](model)
    on_gpu = next(model.parameters(), torch.empty(0)).is_cuda
    if not on_gpu:
        keep_freed_memory()
    return RecordedModel(made) if on_gpu and numbers == "bf16" else made


@cache
def keep_freed_memory() -> bool:
    """Let glibc keep what is freed, up to a gigabyte, for the next pass; return whether it does.

    Logits of hundreds of rows are tens of megabytes. By default such a tensor is mapped anew each time it is
    made, and every page of it cleared by the kernel: a quarter of a beam search's time on a CPU. All
    threads share one arena, for others cannot hold blocks as large. Who has set `MALLOC_...` knows better.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return False
    return all(mallopt(name, value) for name, value in _MALLOC.values())


def fast_int8() -> bool:
    """Whether this CPU multiplies bytes in one instruction, and this torch makes use of it, rightly."""
    vnni = getattr(torch.cpu, "_is_vnni_supported", lambda: False)
    if not (torch.backends.mkldnn.is_available() and vnni()):
        return False
    # Sums of the largest products: older instructions cut them off.
    bytes_ = torch.full((3, 640), 127, dtype=torch.int8)
    return bool((torch._int_mm(bytes_, bytes_.t().neg()) == -127 * 127 * 640).all())


def optional_parts(model: Any) -> tuple[Any, Any, Any, bool, Any, bool]:
    """Return what not every model has, to be handed on; `hears` and `embeds` follow what they speak of."""
    cache, read, gist, embed = (getattr(model, name, None) for name in ("cache", "read", "gist", "embed"))
    return cache, read, gist, getattr(model, "hears", False), embed, getattr(model, "embeds", False)


class HalfModel(nn.Module):
    """A copy of a model with its weights in bfloat16, cast once and not at every pass."""

    weight: Tensor
    bias: Tensor

    def __init__(self, model: Any) -> None:
        """Copy and cast; whole numbers stay what they are."""
        super().__init__()
        self.config = model.config
        self.model = copy.deepcopy(model).to(torch.bfloat16)
        # Rows of logits that start at round addresses are written faster; what is added is never likely.
        more = -model.config.vocab_size % 64
        bias = F.pad(model.bias.detach(), (0, more), value=float("-inf"))
        bias[model.config.mask_id] = float("-inf")  # [MASK] is never predicted
        self.register_buffer("weight", F.pad(self.model.tokens.weight.detach(), (0, 0, 0, more)))
        self.register_buffer("bias", bias.bfloat16())
        self.condition = self.model.condition
        self.cache, self.read, self.gist, self.hears, self.embed, self.embeds = optional_parts(self.model)

    def hidden(self, xt: Tensor, e: Tensor, **known: Any) -> Tensor:
        """Run the trunk, as the model does."""
        return self.model.hidden(xt, e, **known)

    def head(self, h: Tensor) -> Tensor:
        """Logits of hidden states, some more than there are tokens."""
        return F.linear(h, self.weight, self.bias)

    def head_for(self, words: Tensor) -> Callable[[Tensor], Tensor]:
        """Make a head for some words (N,) alone: what `head` gives at them."""
        return partial(F.linear, weight=self.weight[words], bias=self.bias[words])


class Int8Linear(nn.Module):
    """A linear map in whole numbers: weights of one byte with a scale a row, inputs rounded likewise.

    Each row of the input has a scale of its own and whole numbers add up exactly, so the answer to a
    row does not depend on the rows beside it.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Round the weights (out, in), as `checkpoint.quantise` does; what it rounded stays the same."""
        super().__init__()
        scale = weight.detach().float().abs().amax(1).clamp_min(_TINY) / 127
        self.register_buffer("weight", (weight.detach().float() / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach().float())

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to float32 (..., out)."""
        return int8_linear(x, weight=self.weight, scale=self.scale, bias=self.bias)

    def some(self, outputs: Tensor) -> Callable[[Tensor], Tensor]:
        """Make the map to some of the outputs (N,) alone; what was rounded is not rounded again."""
        bias = None if self.bias is None else self.bias[outputs]
        return partial(int8_linear, weight=self.weight[outputs], scale=self.scale[outputs], bias=bias)


def int8_linear(x: Tensor, *, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Map x (..., in) to float32 (..., out) by weights of one byte (out, in), a scale and a bias a row."""
    rows = x.detach().reshape(-1, x.shape[-1]).float()
    # What is done with is written over, and sums become floats where they stand: to fetch new memory
    # takes longer than the arithmetic.
    size = rows.abs()
    step = size.amax(1, keepdim=True).clamp_min_(_TINY).div_(127)
    rounded = torch.div(rows, step, out=size).round_().to(torch.int8)
    whole = torch._int_mm(rounded, weight.t())
    y = whole.view(torch.float32)
    many = max(1, _SUMS // len(weight))
    for first in range(0, len(y), many):
        part = slice(first, first + many)
        some = y[part].copy_(whole[part]).mul_(scale).mul_(step[part])
        if bias is not None:
            some.add_(bias)
    return y.view(*x.shape[:-1], len(weight))


class RowLinear(nn.Module):
    """A linear map that takes one row after the other.

    The last bits of a product of floats may depend on how many rows there are, and a last bit decides
    now and then to which whole number a later map rounds.
    """

    def __init__(self, linear: nn.Linear) -> None:
        """Wrap a linear map."""
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, in) to (B, out)."""
        return torch.cat([self.linear(row) for row in x.split(1)])


class Int8Model(nn.Module):
    """A copy of a model with its linear maps in whole numbers, but for those that read the vector.

    These are little work, and all places depend on them: rounded, they change far more answers.
    """

    def __init__(self, model: Any) -> None:
        """Copy and round."""
        super().__init__()
        self.config = model.config
        self.model = copy.deepcopy(model)
        for name, part in list(self.model.named_modules()):
            if isinstance(part, nn.Linear):
                parent, _, leaf = name.rpartition(".")
                steers = "modulation" in name or name.startswith("projection")
                made = RowLinear(part) if steers else Int8Linear(part.weight, part.bias)
                setattr(self.model.get_submodule(parent), leaf, made)
        bias = model.bias.detach().clone()
        bias[model.config.mask_id] = float("-inf")  # [MASK] is never predicted
        self.vocabulary = Int8Linear(model.tokens.weight, bias)
        self.condition = getattr(self.model, "condition", None)
        self.cache, self.read, self.gist, self.hears, self.embed, self.embeds = optional_parts(self.model)

    def hidden(self, xt: Tensor, e: Tensor, **known: Any) -> Tensor:
        """Run the trunk, as the model does, with some rows after the others; that changes none of them."""
        parts = -(-xt.numel() // _PLACES)
        if parts <= 1:
            return self.model.hidden(xt, e, **known)
        many = -(-len(xt) // parts)
        found = []
        for first in range(0, len(xt), many):
            rows = slice(first, first + many)
            some = {name: _pick_rows(value, rows) for name, value in known.items()}
            found.append(self.model.hidden(xt[rows], e[rows], **some))
        return torch.cat(found)

    def head(self, h: Tensor) -> Tensor:
        """Logits of hidden states; [MASK] is never predicted."""
        return self.vocabulary(h)

    def head_for(self, words: Tensor) -> Callable[[Tensor], Tensor]:
        """Make a head for some words (N,) alone: what `head` gives at them, to the bit."""
        return self.vocabulary.some(words)


def _pick_rows(value: Any, rows: slice) -> Any:
    """Return some rows of a tensor, or of each in a tuple; None is None in every row."""
    if isinstance(value, tuple):
        return tuple(_pick_rows(each, rows) for each in value)
    return value if value is None else value[rows]


@dataclass(frozen=True)
class _Recording:
    """A trunk as a CUDA graph, with the tensors it reads and the one it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    output: Tensor

    @staticmethod
    def of(run: Callable[[list[Tensor]], Tensor], given: list[Tensor], pool: Any) -> _Recording:
        """Record one run; `run` must wait for nothing."""
        inputs = [tensor.clone() for tensor in given]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries set themselves up at first use, which cannot be recorded
            for _ in range(3):
                run(inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, as a server's encoder does.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            output = run(inputs)
        return _Recording(graph, inputs, output)

    def replay(self, given: list[Tensor]) -> Tensor:
        """Run again with other values; the output is the caller's."""
        torch._foreach_copy_(self.inputs, given)
        self.graph.replay()
        return self.output.clone()


class RecordedModel:
    """A model whose trunk is recorded for each shape that keeps coming: one launch instead of hundreds."""

    def __init__(self, model: Any, *, record_after: int = _RECORD_AFTER, compile: bool = False) -> None:
        """Wrap a model on a GPU; `compile` fuses the trunk first, which takes long at each new shape."""
        self.config, self.model, self.head = model.config, model, model.head
        self.condition = getattr(model, "condition", None)
        # A place at a time there is little to compute, and nothing to record.
        self.cache, self.read, self.gist, self.hears, self.embed, self.embeds = optional_parts(model)
        self._trunk = torch.compile(model.hidden, dynamic=False) if compile else model.hidden
        self._after = record_after
        self._met: Counter[Hashable] = Counter()
        self._recordings: dict[Hashable, _Recording] = {}
        self._pool: Any = None
        self._lock = threading.Lock()  # a recording's tensors serve one caller at a time

    @torch.inference_mode()
    def hidden(
        self,
        xt: Tensor,
        e: Tensor,
        *,
        t: Tensor | None = None,
        drop: Tensor | None = None,
        condition: tuple[Tensor, ...] = (),
        causal: Tensor | None = None,
    ) -> Tensor:
        """Run the trunk, as the model does, by a recording if there is one."""
        named = {"t": t, "drop": drop, "causal": causal}
        optional = {name: x for name, x in named.items() if x is not None}
        given = [xt, e, *optional.values(), *condition]

        def run(tensors: list[Tensor]) -> Tensor:
            named = dict(zip(optional, tensors[2:], strict=False))
            known = {"condition": tuple(tensors[2 + len(optional) :])} if condition else {}
            return self._trunk(tensors[0], tensors[1], **named, **known)

        key = (*optional, *((x.shape, x.dtype) for x in given))
        with self._lock:
            if key not in self._recordings:
                self._met[key] += 1
                if self._met[key] <= self._after or len(self._recordings) >= _RECORDINGS:
                    return run(given)
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                self._recordings[key] = _Recording.of(run, given, self._pool)
            return self._recordings[key].replay(given)

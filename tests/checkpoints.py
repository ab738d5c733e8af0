"""Small random checkpoints of the architectures that encoders have, each with a vocabulary of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


# --- one that brings code ---------------------------------------------------------------------------

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


def add_code(checkpoint: Path, folder: Path) -> Path:
    """Copy a checkpoint to a folder as one that brings its own code, with tasks."""
    shutil.copytree(checkpoint, folder)
    (folder / "custom_st.py").write_text(CUSTOM_ST)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0] |= {"type": "custom_st.Transformer", "kwargs": ["task"]}
    (folder / "modules.json").write_text(json.dumps(modules))
    settings = json.loads((folder / "config_sentence_transformers.json").read_text())
    settings |= {"default_prompt_name": None, "prompts": {"retrieval.query": "query: ", "text-matching": ""}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder

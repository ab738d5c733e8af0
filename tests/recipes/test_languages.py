"""Ten languages, and encoders with a vocabulary of their own: from text to a table."""

from __future__ import annotations

import json
import math
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import CORPUS, TEXTS, add_code

from recipes.rehearsal import TINY, OtherEncoder, SpanEncoder, asked_by, open_inverter, speak
from unembed.corpus import PreparedData, prepare
from unembed.encoders import load_encoder
from unembed.inverter import Inverter


def write_parallel(path: Path, **languages: list[str]) -> Path:
    """Write parallel texts, a line for each text in all languages."""
    rows = [dict(zip(languages, texts, strict=True)) for texts in zip(*languages.values(), strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_ten_languages_for_another_encoder(
    recipe: Any, folder: Path, tmp_path: Path, at_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel = write_parallel(
        tmp_path / "parallel.jsonl",
        en=["the small cat sat", "the old dog ran"],
        zh=["the 猫", "roof"],
        xx=["roof", "roof"],
    )
    where = ["--data", folder / "data", "--parallel", parallel, "--lock", tmp_path / "lock"]
    run = tmp_path / "run"
    speak(recipe, monkeypatch, "languages", "train", "--encoder", "other", *where, "--out", run, fields=TINY)
    figures = json.loads((run / "figures.json").read_text())
    assert [figures[key] for key in ("encoder", "kind", "size", "steps")] == ["other", "transformer", 12, 2]
    inverter = Inverter.from_pretrained(run / "run" / "model", device="cpu")
    assert (inverter.encoder_name, inverter.config.model.embedding_size) == ("other", 12)
    found = {name: row["all"] for name, row in figures["languages"].items()}
    assert {name: each["without_vector"] for name, each in found.items()} == {"en": 0, "zh": 1, "xx": 2}
    modes = recipe("encoders").MODES
    for each in found.values():
        assert all(math.isfinite(value) for mode in modes for value in each[mode].values())
    assert {value for mode in modes for value in found["xx"][mode].values()} == {0.0}
    assert recipe("encoders").PreparedData.open(folder / "data").encoder_name == "fake"  # as it was


def test_between_which_cosines_answers_lie(
    recipe: Any, tmp_path: Path, at_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {"en": ["The small cat sat", "the old dog ran", "roof"], "zh": ["the 猫", "the 犬", "the 鳥"]}
    parallel = write_parallel(tmp_path / "parallel.jsonl", **texts)
    out = tmp_path / "facts.json"
    monkeypatch.setattr(recipe("languages"), "ENCODER", "fake")
    where = ["facts", "--parallel", parallel, "--out", out]
    speak(recipe, monkeypatch, "languages", *where)
    without = json.loads(out.read_text())
    assert set(without) == {"encoder", "languages"}
    speak(recipe, monkeypatch, "languages", *where, "--encoder", "fake", "other")
    found = json.loads(out.read_text())
    cosines = found.pop("cosines")
    assert found == without and set(cosines) == {"fake", "other"}
    unit = SpanEncoder().encode(texts["en"])
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    another = float((unit * np.roll(unit, 1, 0)).sum(1).mean())
    expected = {"of_another_text": another, "of_the_tokens_sought": 1}
    assert cosines["fake"]["en"] == pytest.approx(expected, abs=1e-4)
    # One text of three has no vector by this encoder; what cannot be spelt is missing in an answer.
    assert cosines["other"]["en"]["of_the_tokens_sought"] == pytest.approx(2 / 3, abs=1e-4)
    assert cosines["fake"]["zh"]["of_the_tokens_sought"] < 0.9


def test_texts_without_a_vector_count_as_not_recovered(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inverter, encoder = open_inverter(causal=True), OtherEncoder()
    encoder.size = inverter.size
    inverter._encoder = encoder
    texts = ["the old dog ran", "roof", "a red bird", "roof", "猫"]
    spans = inverter.tokenizer.spans(texts)
    by_heart = {
        v.tobytes(): (span, t) for v, span, t in zip(encoder.encode(texts), spans, texts, strict=True)
    }

    def invert(vectors: np.ndarray, **_: Any) -> list[Namespace]:
        assert np.abs(vectors).sum(1).all()  # zeros are refused
        return [Namespace(ids=ids, text=text) for ids, text in (by_heart[v.tobytes()] for v in vectors)]

    measure = recipe("encoders").measure
    sets = {"half": texts[:4], "none": texts[1:2], "unknown": texts[4:]}
    with monkeypatch.context() as patch:
        patch.setattr(inverter, "invert", invert)
        found = measure(inverter, sets, modes=["c8"], unknown=1)
    assert [each["without_vector"] for each in found.values()] == [2, 1, 0]
    for name, share in (("half", 0.5), ("none", 0.0)):
        assert found[name]["c8"] == dict.fromkeys(found[name]["c8"], pytest.approx(share))
    blank = found["unknown"]["c8"]
    assert (blank["f1"], blank["f1_known"]) == (1.0, 0.0)  # not a word that the vocabulary has
    alone = measure(inverter, {"none": texts[1:2]}, modes=["c8", "beam"])[
        "none"
    ]  # not one vector in all sets
    assert set(alone["beam"].values()) == set(alone["c8"].values()) == {0.0}


@pytest.mark.filterwarnings("ignore:.* texts are longer than")
def test_ten_languages_from_text_to_a_table_of_encoders(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {
        "en": "The night train crossed the border before anyone awoke.",
        "de": "Der Nachtzug fuhr über die Grenze, bevor jemand erwachte.",
        "ru": "Ночной поезд пересёк границу, прежде чем кто-либо проснулся.",
    }
    for name, text in texts.items():
        words = text.split()
        turned = [" ".join(words[i % len(words) :] + words[: i % len(words)]) for i in range(12)]
        (tmp_path / f"{name}.txt").write_text("\n".join(turned) + "\n", encoding="utf-8")
    parallel = write_parallel(
        tmp_path / "parallel.jsonl", **{name: [text] * 2 for name, text in texts.items()}
    )
    data, lsa = tmp_path / "data", tmp_path / "encoders" / "ten-lsa"
    lsa.parent.mkdir()
    speak(recipe, monkeypatch, "languages", "prepare", *tmp_path.glob("*.txt"), "--out", data)
    speak(recipe, monkeypatch, "encoders", "lsa", "--data", data, "--out", lsa, "--size", 8)
    encoder = load_encoder(lsa, device="cpu")
    assert (np.linalg.norm(encoder.encode(list(texts.values())), axis=1) > 0.99).all()
    where = ["--data", data, "--parallel", parallel, "--lock", tmp_path / "lock"]
    runs = {"lsa": ["--encoder", lsa], "usual": []}
    # With a vocabulary of this size, all of them take long.
    monkeypatch.setattr(recipe("languages"), "MODES", ["c8", "causal"])
    for name, chosen in runs.items():
        speak(
            recipe, monkeypatch, "languages", "train", *chosen, *where, "--out", tmp_path / name, fields=TINY
        )
    capsys.readouterr()
    joined = tmp_path / "ten.json"
    speak(recipe, monkeypatch, "languages", "table", *(tmp_path / name for name in runs), "--out", joined)
    rows = json.loads(joined.read_text())["encoders"]
    assert [(row["encoder"], row["kind"]) for row in rows] == [
        ("ten-lsa", "lsa"),
        ("all-MiniLM-L6-v2", "transformer"),
    ]
    assert [list(row["languages"]) for row in rows] == [["en", "de", "ru"]] * 2
    assert str(tmp_path) not in joined.read_text()
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "| encoder | mode | en | de | ru | mean F1 | mean cosine |"
    assert {line.count("|") for line in table} == {8}
    assert [line.split()[1:4:2] for line in table[2:]] == [
        [name, mode] for name in ("ten-lsa", "all-MiniLM-L6-v2") for mode in ("c8", "causal")
    ]


def test_figures_of_ten_languages_are_asked_for_once_an_encoder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "encoders" / "static").mkdir(parents=True)
    assert not any("languages.py" in call[0] for call in asked_by("figures.sh", tmp_path, TEN=""))
    calls = [c for c in asked_by("figures.sh", tmp_path, TEN="ten") if "ten" in c or "languages.py" in c[0]]
    assert [call[1] for call in calls] == ["lsa", "train", "train", "train", "table"]
    lsa, *trained, table = calls
    assert lsa[lsa.index("--out") + 1] == f"{out}/ten-lsa"
    chosen = [call[call.index("--encoder") + 1] for call in trained]
    assert chosen == ["all-MiniLM-L6-v2", f"{out}/encoders/static", f"{out}/ten-lsa"]
    runs = [call[call.index("--out") + 1] for call in trained]
    assert runs == [f"{out}/ten-{Path(name).name}" for name in chosen] and table[2:5] == runs
    assert ["--beside" in call for call in trained] == [True, False, False]


@pytest.fixture(scope="module")
def own_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text to prepare for each encoder, passages of other settings than usual, texts to measure on."""
    folder = tmp_path_factory.mktemp("own-words")
    prepare(TEXTS, encoder=SpanEncoder(), out=folder / "data", max_tokens=36, min_tokens=2, kind="passages")
    for i in range(2):
        (folder / f"text{i}.txt").write_text("\n".join(text.replace("\n", " ") for text in CORPUS[i::2]))
    (folder / "texts").mkdir()
    (folder / "texts" / "few.txt").write_text("hello world\nthe old captain and the lazy dog\n")
    return folder


def test_more_encoders_have_a_row_each_in_the_same_table(
    recipe: Any, own_words: Path, checkpoint: Callable[[str], Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    qwen, gemma = ((tmp_path / name) for name in ("qwen", "gemma"))
    qwen.symlink_to(checkpoint("qwen3"))
    gemma.symlink_to(checkpoint("gemma3"))
    jina = add_code(checkpoint("xlm-roberta"), tmp_path / "jina")
    chosen = [f"{qwen}", f"{gemma}#document", f"{jina}#text-matching"]
    names = ["qwen", "gemma#document", "jina#text-matching"]
    out = tmp_path / "out"
    (out / "static").mkdir(parents=True)
    settings: dict[str, Any] = {
        "where": (own_words / "data", own_words / "texts"), "MORE": " ".join(chosen), "TRUST": "1",
        "CORPUS": f"{own_words}/text*.txt", "FIELDS": " ".join([*TINY, "compile=False"]),
    }  # fmt: skip
    calls = [call for call in asked_by("encoders.sh", tmp_path, **settings) if call[1] != "lsa"]
    usual = ["all-MiniLM-L6-v2", f"{out}/static", f"{out}/lsa"]
    more = [(verb, name) for name in chosen for verb in ("prepare", "train")]
    assert [tuple(call[1:3]) for call in calls[:-1]] == [("train", name) for name in usual] + more
    assert ["--trust-remote-code" in call for call in calls] == [False] * 3 + [True] * 6 + [False]
    runs = [out / f"run-{Path(name).name}" for name in [*usual, *chosen]]
    assert calls[-1][1:-2] == ["table", *map(str, runs)]

    # What the script asked for, done.
    for run in runs[:3]:
        row = {"encoder": run.name, "kind": "another", "size": 3, "sets": {}}
        (run / "figures.json").write_text(json.dumps(row))
    for run in runs[3:]:
        shutil.rmtree(run)
    for script, verb, *words in calls[3:]:
        lock = ["--lock", tmp_path / "lock"] if verb == "train" else []
        speak(recipe, monkeypatch, Path(script).stem, verb, *words, *lock)
    rows = json.loads((out / "encoders.json").read_text())["encoders"]
    assert [row["encoder"] for row in rows[3:]] == names
    for row, name, size in zip(rows[3:], names, (32, 24, 32), strict=True):
        data = PreparedData.open(out / f"data-{name}")
        assert (row["size"], row["vocabulary"], row["steps"]) == (size, data.tokenizer.size, 2)
        assert (data.max_tokens, data.manifest["min_tokens"]) == (36, 2)  # those of the data
        inverter = Inverter.from_pretrained(out / f"run-{name}" / "run" / "model", device="cpu")
        assert inverter.config.model.vocab_size == inverter.tokenizer.size == row["vocabulary"]
        assert row["sets"]["few"].keys() >= {"texts", "characters", *recipe("encoders").MODES}
    assert len({row["vocabulary"] for row in rows[3:]}) == 3
    table = capsys.readouterr().out.splitlines()
    assert sum(f"| qwen | transformer | 32 | {rows[3]['vocabulary']} |" in line for line in table) == 8
    assert str(tmp_path) not in (out / "encoders.json").read_text()


def test_more_encoders_are_refused_in_one_sentence(
    recipe: Any, own_words: Path, checkpoint: Callable[[str], Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fails(verb: str, encoder: object, said: str, *words: object) -> None:
        where = ["--data", own_words / "data", "--out", tmp_path / "refused"]
        with pytest.raises(SystemExit, match=said):
            speak(recipe, monkeypatch, "encoders", verb, encoder, *words, *where)

    text, qwen = own_words / "text0.txt", checkpoint("qwen3")
    fails("prepare", add_code(checkpoint("xlm-roberta"), tmp_path / "jina"), "add --trust-remote-code", text)
    fails("prepare", "jinaai/jina-embeddings-v3", "add --trust-remote-code", text)
    fails("prepare", f"{qwen}#query", "joins its prompt .* with the text's first token", text)
    assert not (tmp_path / "refused").exists()
    fails("train", qwen, "see encoders.py prepare", "--texts", own_words / "texts")

    (tmp_path / "out" / "static").mkdir(parents=True)
    for more, corpus, said in (
        ("a/model b/Model", "text.txt", "two encoders are called model"),
        ("some/static", "text.txt", "two encoders are called static"),
        ("a/model", "", "CORPUS"),
    ):
        assert asked_by("encoders.sh", tmp_path, fail="early", MORE=more, CORPUS=corpus) == []
        assert said in capfd.readouterr().err.replace("Model", "model")  # either of the two
    calls = asked_by("encoders.sh", tmp_path, fail="prepare", MORE="a/model", CORPUS="text.txt")
    assert calls[-1][1:4] == ["prepare", "a/model", "text.txt"] and "--trust-remote-code" not in calls[-1]

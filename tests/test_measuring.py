"""`unembed evaluate` into records, and `unembed compare`, on an inverter that knows some texts by heart."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recovering import SHAPE, FakeEncoder, FakeInverter, make_tokenizer

from unembed.cli import main
from unembed.corpus import prepare
from unembed.errors import UnembedError
from unembed.evaluate import plan
from unembed.records import read_records

TEXTS = [f"the {a} {n} {v} on the {m}" for a in ("old", "red") for n in ("cat", "dog") for v in ("sat", "ran")
         for m in ("mat", "road")]  # fmt: skip
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def inverter(monkeypatch: pytest.MonkeyPatch) -> FakeInverter:
    """Every second text is known."""
    fake = FakeInverter(make_tokenizer(), known=TEXTS[::2])
    fake.pause = 0
    monkeypatch.setattr("unembed.cli.measuring.open_inverter", lambda *_, **__: fake)
    monkeypatch.setattr("unembed.cli.measuring.encoder_of", lambda *_, **__: FakeEncoder())
    return fake


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*argv: object) -> tuple[int, str, str]:
        code = 0
        try:
            main([str(token) for token in argv])
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS), encoding="utf-8")
    return path


def refused(result: tuple[int, str, str]) -> str:
    code, out, err = result
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    return err


def test_the_table_is_as_ever_and_the_records_are_written(run: Run, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    code, shown, notes = run("evaluate", texts, "-o", out, "--steps", "2,8")
    assert code == 0
    assert shown.count("confidence") == 2 and "BLEU" in shown and "suite" not in shown
    assert f"32 records in {out}" in notes and "16 texts" in notes
    records = read_records(out)
    assert [m.name for m in records.methods] == ["confidence-2", "confidence-8"]
    assert records.summary is not None and len(records.rows) == 32
    assert run("evaluate", texts, "-o", out, "--steps", "2,8")[1] == shown
    assert "other settings" in refused(run("evaluate", texts, "-o", out, "--steps", "2"))


def test_a_causal_strategy_takes_all_its_steps_once(run: Run, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    assert "does not read left to right" in refused(run("evaluate", texts, "--strategy", "causal", "-o", out))
    assert not out.exists()
    with pytest.raises(UnembedError, match="does not read left to right, as beam does"):
        plan(["beam"], config=SHAPE)
    reading = replace(SHAPE, causal=True)
    methods = plan(["causal", "beam", "confidence"], [2, 4], config=reading)
    assert [m.name for m in methods] == ["causal-8", "beam-8", "confidence-2", "confidence-4"]


def test_auto_is_recorded_as_what_it_was(
    run: Run, texts: Path, tmp_path: Path, inverter: FakeInverter, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "records.jsonl"
    monkeypatch.setattr(inverter, "config", inverter.config.override(causal=True))
    assert run("evaluate", texts, "-o", out)[0] == 0
    assert [(m.name, m.strategy, m.steps) for m in read_records(out).methods] == [("beam-8", "beam", 8)]
    assert "auto" not in out.read_text(encoding="utf-8")
    calls = len(inverter.calls)
    # The file is one and the same by either name, and complete.
    assert run("evaluate", texts, "-o", out, "--strategy", "beam")[0] == 0
    assert run("evaluate", texts, "-o", out, "--strategy", "auto")[0] == 0
    assert len(inverter.calls) == calls
    found = json.loads(run("evaluate", texts, "--strategy", "auto,beam", "--steps", "2,4", "--json")[1])
    assert [(f["strategy"], f["steps"]) for f in found] == [("confidence", 2), ("confidence", 4), ("beam", 8)]
    assert "beam-8 is asked for twice" in refused(run("evaluate", texts, "--strategy", "auto,beam"))
    assert "steps must be whole numbers" in refused(run("evaluate", texts, "--steps", ""))


def test_drafts_are_asked_for_and_recorded(
    run: Run, texts: Path, tmp_path: Path, inverter: FakeInverter
) -> None:
    out = tmp_path / "records.jsonl"
    argv = ("evaluate", texts, "-o", out, "--steps", "2", "--drafts")
    assert run(*argv, 4)[0] == 0
    assert {call["drafts"] for call in inverter.calls if "first" in call} == {4}
    assert [(m.name, m.drafts) for m in read_records(out).methods] == [("confidence-2-drafts-4", 4)]
    assert "confidence-2-drafts-4, now confidence-2" in refused(run(*argv, 1))


def test_a_language_that_no_suite_has_is_named(run: Run) -> None:
    assert "no text in xx;" in refused(run("evaluate", "--builtin", "parallel", "--languages", "en,xx"))


def test_json_has_suites_and_languages(run: Run, texts: Path, tmp_path: Path) -> None:
    lines = [{"text": text, "language": "en" if i % 2 else "ko"} for i, text in enumerate(TEXTS)]
    spoken = tmp_path / "spoken.jsonl"
    spoken.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    found = json.loads(run("evaluate", texts, spoken, "--json", "--limit", 4)[1])
    assert [(f["suite"], f["language"], f["texts"]) for f in found] == [
        ("texts", None, 4), ("spoken", None, 8), ("spoken", "ko", 4), ("spoken", "en", 4)
    ]  # fmt: skip
    assert [f["exact_match"] for f in found] == [0.5, 0.5, 1, 0]
    assert set(found[0]["intervals"]) >= {"token_f1", "bleu"}
    shown = run("evaluate", texts, spoken)[1]
    assert "spoken, 16 texts" in shown and "language" in shown
    only = json.loads(run("evaluate", spoken, "--languages", "en", "--json")[1])
    assert [(f["language"], f["texts"]) for f in only] == [(None, 8)]


def test_built_in_sentences(run: Run) -> None:
    argv = ("evaluate", "--builtin", "english, parallel", "--limit", 2, "--languages", "en,ar", "--json")
    found = json.loads(run(*argv)[1])
    assert [(f["suite"], f["language"], f["texts"]) for f in found] == [
        ("english", None, 2), ("parallel", None, 4), ("parallel", "en", 2), ("parallel", "ar", 2)
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["pairs", "passages"])
def test_baselines(run: Run, texts: Path, tmp_path: Path, kind: Any) -> None:
    data = tmp_path / "data"
    prepare(TEXTS[:8], encoder=FakeEncoder(), tokenizer=make_tokenizer(), out=data, max_tokens=8, kind=kind)
    argv = ("evaluate", texts, "--strategy", "none", "--baseline", "random,unconditional,nearest")
    found = json.loads(run(*argv, "--data", data, "--json")[1])
    assert [(f["strategy"], f["steps"]) for f in found] == [
        ("random", 0),
        ("unconditional", 8),
        ("nearest", 0),
    ]
    assert found[2]["exact_match"] == 0.5
    less = json.loads(run(*argv, "--data", data, "--data-limit", 4, "--json")[1])
    assert less[2]["exact_match"] == 0.25


def test_ctrl_c_keeps_what_is_done(
    run: Run, texts: Path, tmp_path: Path, inverter: FakeInverter, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "records.jsonl"
    argv = ("evaluate", texts, "-o", out, "--batch-size", 4)
    invert = inverter.invert

    def stop(*args: Any, **options: Any) -> Any:
        if options.get("first") == 8:
            raise KeyboardInterrupt
        return invert(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(inverter, "invert", stop)
        code, shown, notes = run(*argv)
    assert (code, shown) == (130, "") and "run the same command again to go on" in notes
    assert len(read_records(out).rows) == 8
    assert run(*argv)[0] == 0
    assert len(read_records(out).rows) == 16


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--builtin", "englisch"], "did you mean 'english'"),
        (["--baseline", "nearest"], "add --data FOLDER"),
        (["--baseline", "oracle"], "unknown baseline 'oracle'"),
        (["--data", "folder"], "add --baseline nearest"),
        (["--languages", "en"], "says no language"),
        (["--strategy", "none"], "nothing to measure"),
        (["--steps", "8,8"], "asked for twice"),
        (["--drafts", "65"], "drafts must be a whole number from 1 to 64, not 65"),
        (["--drafts", "2", "--temperature", "0"], "all would be the same"),
        (["--strategy", "confidence,euler", "--beams", "4"], "--beams concerns beam"),
        (["--batch-size", "0"], "--batch-size must be at least 1, not 0."),
        (["-o", "-"], "give -o the name of a file"),
    ],
)
def test_bad_options(run: Run, texts: Path, argv: list[str], said: str) -> None:
    assert said in refused(run("evaluate", texts, *argv))


# --- compare --------------------------------------------------------------------------------------


@pytest.fixture
def two(run: Run, texts: Path, tmp_path: Path, inverter: FakeInverter) -> tuple[Path, Path]:
    """Records of an inverter that knows half of the texts, and of one that knows all."""
    a, b = tmp_path / "half.jsonl", tmp_path / "all.jsonl"
    run("evaluate", texts, "-o", a, "--steps", "2,8")
    inverter.memory = FakeInverter(make_tokenizer(), known=TEXTS).memory
    run("evaluate", texts, "-o", b, "--steps", "8")
    return a, b


def test_compare(run: Run, two: tuple[Path, Path]) -> None:
    a, b = two
    code, shown, notes = run("compare", a, b)
    assert code == 0
    assert "all#confidence-8 recovers more than half#confidence-8" in shown
    assert "A is half#confidence-8" in notes
    (found,) = json.loads(run("compare", f"{a}#confidence-2", b, "--json")[1])
    assert (found["a"], found["b"], found["texts"]) == ("half#confidence-2", "all#confidence-8", 16)
    exact = next(d for d in found["differences"] if d["metric"] == "exact_match")
    assert (exact["a"], exact["b"], exact["difference"]) == (0.5, 1, 0.5)
    assert exact["interval"][0] > 0
    (same,) = json.loads(run("compare", f"{a}#confidence-2", f"{a}#confidence-8", "--json")[1])
    assert "recover the same" in same["verdict"]


def test_bad_comparisons(run: Run, two: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = two
    assert "say which methods" in refused(run("compare", a, a))
    assert "no method 'x'; it has confidence-2, confidence-8" in refused(run("compare", f"{a}#x", b))
    assert "there is no file" in refused(run("compare", tmp_path / "none.jsonl", b))
    other, texts = tmp_path / "other.jsonl", tmp_path / "other.txt"
    texts.write_text("the bird\n", encoding="utf-8")
    run("evaluate", texts, "-o", other)
    assert "no text in common" in refused(run("compare", other, b))

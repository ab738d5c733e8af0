"""`unembed evaluate`."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.commands import Run


def test_evaluate(run: Run, texts: Path, model: Path) -> None:
    argv = ("evaluate", texts, "--model", model, "--strategy", "confidence,euler", "--steps", "1, 4")
    records = run(*argv, "--limit", 3, "--json").json
    assert [(r["strategy"], r["steps"]) for r in records] == [
        ("confidence", 1),
        ("confidence", 4),
        ("euler", 1),
        ("euler", 4),
    ]
    keys = (
        "strategy, steps, texts, token_accuracy, token_f1, exact_match, bleu, rouge_l, cosine, "
        "forward_passes, encoder_calls, texts_per_second"
    )
    for record in records:
        assert set(keys.split(", ")) <= record.keys()
        assert record["texts"] == 3
    shown = run(*argv, "--limit", 3)
    assert shown.out.count("euler") == 2
    assert "BLEU" in shown.out


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--strategy", "confidence,oiler"], "'euler'"),
        (["--steps", "8,many"], "'8,many'"),
        (["--steps", "0"], "between 1 and 32"),
        (["--limit", "0"], "limit"),
    ],
)
def test_bad_options_of_evaluate(run: Run, texts: Path, model: Path, argv: list[str], expected: str) -> None:
    assert expected in run("evaluate", texts, "--model", model, *argv).sentence


def test_evaluate_needs_a_file(run: Run, model: Path) -> None:
    assert "--builtin english" in run("evaluate", "--model", model).sentence

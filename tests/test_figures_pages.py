"""The tables of the pages on encoders, the paper and peers are those of benchmarks/results, as printed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from test_readme import README, SETS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/encoders.md").read_text(encoding="utf-8")
PAPER = (ROOT / "docs/paper.md").read_text(encoding="utf-8")
PEERS = (ROOT / "docs/peers.md").read_text(encoding="utf-8")
PROSE = " ".join(PAGE.split())
STRATEGIES = {
    "`confidence`, 8": "c8",
    "`confidence`, 32": "c32",
    "`sequential`, 32": "s32",
    "`two-stage`, 32": "t32",
    "`euler`, 32": "e32",
    "`euler-remask`, 32": "r32",
    "`causal`": "causal",
    "`beam`": "beam",
}
LETTERS, WORDS = ("ru", "ar", "ko"), ("en", "de", "fr", "es", "pt")


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks/results" / name).read_text(encoding="utf-8"))


def compared(minutes: float) -> dict[str, Any]:
    """All variants that were trained for so many minutes, by name; of two with one name, the later."""
    rounds = results("compare-h200.json")["rounds"]
    return {v["name"]: v for each in rounds if each["minutes_each"] == minutes for v in each["variants"]}


def table(header: str, page: str = PAGE) -> dict[str, list[str]]:
    """Read the one table whose header begins so: the cells of each row by its first."""
    starts = [match.start() for match in re.finditer(rf"^{re.escape(header)}", page, flags=re.MULTILINE)]
    assert len(starts) == 1, header
    head, _, *lines = page[starts[0] :].partition("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {len(row) for row in rows} == {head.count("|") - 1}
    assert len({row[0] for row in rows}) == len(rows)
    return {first: rest for first, *rest in rows}


def numbers(cells: Iterable[str]) -> list[str]:
    return [number for cell in cells for number in re.findall(r"[\d,]*\.?\d+", cell)]


def compare(shown: list[str], measured: list[float], where: str) -> None:
    """Hold each number to the measured one, rounded to as many places as are shown, a half upwards."""
    assert len(shown) == len(measured), where
    for text, value in zip(shown, measured, strict=True):
        number = Decimal(text.replace(",", ""))
        # A mean of decimal numbers is a little off in binary, which must not decide about a half.
        exact = Decimal(str(round(value, 9)))
        assert number == exact.quantize(number, ROUND_HALF_UP), (where, text, value)


def sentence(pattern: str) -> list[str]:
    """Read the numbers of the one sentence of the page that is like the pattern."""
    (said,) = re.findall(pattern, PROSE)
    return list(said)


def average(figures: Iterable[dict[str, Any]], mode: str, key: str) -> float:
    return mean(float(each[mode][key]) for each in figures)


def test_a_changed_number_is_found() -> None:
    compare([".46", "1,280", "0.0"], [0.4551, 1280, 0.04], "rounded as printed")
    for text, value in ((".47", 0.4551), (".45", 0.4551), ("1,281", 1280), (".456", 0.4551)):
        with pytest.raises(AssertionError):
            compare([text], [value], "changed")


def test_encoders_by_set() -> None:
    encoders = results("encoders-h200.json")["encoders"]
    assert [each["encoder"] for each in encoders] == ["all-MiniLM-L6-v2", "static", "lsa"]
    rows = table("| set | F1: MiniLM / static / LSA |")
    names = {**SETS, "passages kept aside": "in_distribution"}
    assert {names[name] for name in rows} == set(encoders[0]["sets"])
    for name, cells in rows.items():
        sets = [each["sets"][names[name]]["beam"] for each in encoders]
        expected = [each[key] for key in ("f1", "exact", "same_tokens", "cosine") for each in sets]
        compare(numbers(cells), expected, name)
    said = sentence(r"([\d.]+) minutes on one H200 \(([\d.]+)M, ([\d.]+)M and ([\d.]+)M passages\)")
    passages = [each["passages"] / 1e6 for each in encoders]
    compare(said, [encoders[0]["minutes"], *passages], "training")


def test_encoders_by_strategy() -> None:
    sets = [
        [each["sets"][name] for name in SETS.values()] for each in results("encoders-h200.json")["encoders"]
    ]
    rows = table("| strategy, passes | MiniLM: F1 |")
    assert list(rows) == list(STRATEGIES)
    for name, cells in rows.items():
        expected = [average(each, STRATEGIES[name], key) for each in sets for key in ("f1", "cosine")]
        compare(cells, expected, name)
    said = sentence(
        r"finds (\d), (\d) and (\d) of 1,000 \([^)]*\), `sequential` in as many passes (\d+), (\d) and (\d)"
    )
    exact_of_1000 = [1000 * average(each, mode, "exact") for mode in ("t32", "s32") for each in sets]
    compare(said, exact_of_1000, "exact")


def test_the_bundled_inverter_beside_the_short_runs() -> None:
    said = sentence(r"the bundled inverter, after (\d+) minutes, has ([.\d]+) on chat turns")
    facts = ROOT / "src/unembed/models/all-MiniLM-L6-v2/facts.json"
    minutes = json.loads(facts.read_text(encoding="utf-8"))["training"]["minutes"]
    (part,) = results("heldout-cpu.json")["parts"]
    (f1,) = (
        each["values"]["token_f1"]
        for each in part["figures"]
        if (each["suite"], each["method"]) == ("persona_chat", "beam-32")
    )
    compare(said, [minutes, f1], "the bundled inverter")


def test_starting_from_the_bundled_weights() -> None:
    variants = compared(0.45)
    rows = table("| start from | learns |")
    names = {
        "nothing": "scratch",
        "the bundled weights": "all",
        "the bundled weights, the vocabulary frozen": "embeddings",
        "the bundled weights, all frozen but what the vector steers": "backbone",
    }
    assert list(rows) == list(names)
    for name, cells in rows.items():
        variant = variants[names[name]]
        assert variant["fields"]["encoder"] == "static"
        found = variant["sets"]["mixed"]
        expected = [
            variant["trainable"] / 1e6,
            found["c8"]["f1"],
            *(found["beam"][key] for key in ("f1", "exact", "cosine")),
            variant["validation_loss"],
            variant["steps"],
        ]
        compare(numbers(cells), expected, name)


def test_what_the_vocabulary_does_to_languages() -> None:
    languages = results("languages-vocabulary.json")["languages"]
    rows = table("| language | [UNK] of tokens |")
    assert list(rows) == list(languages)
    for name, cells in rows.items():
        facts = languages[name]
        first, second, characters, *rest = (
            facts[key]
            for key in (
                "unknown",
                "texts_with_unknown",
                "tokens_per_character",
                "longer_than_model",
                "survive_but_case_and_space",
                "survive_but_case_space_and_marks",
            )
        )
        percents = [100 * value for value in rest]
        compare(numbers(cells), [100 * first, 100 * second, characters, *percents], name)


def test_ten_languages() -> None:
    measured = results("languages-h200.json")
    blind = results("languages-vocabulary.json")["languages"]
    rows = table("| language | F1 |")
    assert list(rows) == list(measured["languages"])
    for name, cells in rows.items():
        found = measured["languages"][name]
        first, *own = (found["all"]["beam"][key] for key in ("f1", "f1_known", "exact", "cosine"))
        beside = [found["beside"]["beam"][key] for key in ("f1", "cosine")]
        compare(cells, [first, blind[name]["f1_of_usual_tokens"], *own, *beside], name)
    others = [[blind[name]["f1_of_another_text"] for name in few] for few in (LETTERS, WORDS)]
    said = sentence(r"has (\.\d+) to (\.\d+) in ru, ar and ko, (\.\d+) to (\.\d+) in en, de, fr, es and pt")
    compare(said, [end(each) for each in others for end in (min, max)], "another text")
    said = sentence(r"([\d.]+) minutes on one H200 \(([\d.]+)M passages, a tenth")
    compare(said, [measured["minutes"], measured["passages"] / 1e6], "training")


def test_ten_languages_by_strategy() -> None:
    languages = results("languages-h200.json")["languages"]
    header = "| strategy, passes | " + " | ".join(languages) + " | mean F1 | mean cosine |"
    rows = table(header)
    assert list(rows) == list(STRATEGIES)
    found = [each["all"] for each in languages.values()]
    for name, cells in rows.items():
        mode = STRATEGIES[name]
        means = [average(found, mode, key) for key in ("f1", "cosine")]
        compare(cells, [*(each[mode]["f1"] for each in found), *means], name)


def test_the_cost_of_the_loop() -> None:
    measured = results("loopcost-h200.json")
    theirs, ours = measured["vec2text"], measured["ours"]
    rows = table("| loop |")
    for steps in (50, 20):
        calls, seconds, exact = rows.pop(f"vec2text's, {steps} steps")
        each = theirs["extrapolated"][str(steps)]
        compare([calls, seconds], [each["encoder_calls"], each["seconds_per_text"]], str(steps))
        assert exact == "not measured"
    cells = rows.pop(f"our search, {ours['rounds']} rounds x {ours['candidates']}")
    compare(cells, [ours[key] for key in ("encoder_calls", "seconds_per_text", "exact")], "ours")
    assert not rows
    said = sentence(
        r"from (\d) steps of (\d+) texts at once, in bfloat16 \(([\d.]+), ([\d.]+) and ([\d.]+) s"
    )
    expected = [theirs["measured_steps"], theirs["batch"], *theirs["seconds_per_step"]]
    compare(said, expected, "steps")
    assert f"of {ours['texts']} long texts" in PROSE


def test_the_readme_says_the_same_of_a_start() -> None:
    variants = compared(0.45)
    said = re.search(r"brings\s+token F1 (\.\d+), and (\.\d+) from nothing", README)
    assert said is not None
    measured = [variants[name]["sets"]["mixed"]["beam"]["f1"] for name in ("all", "scratch")]
    compare(list(said.groups()), measured, "a start")


def test_mask_ratios() -> None:
    variants = compared(0.3)
    rows = table("| masked |", PAPER)
    fixed = {f"{round(100 * share)} %": f"fixed-{share}" for share in (0.1, 0.2, 0.4, 0.8, 1.0)}
    schedules = {f"`{name}`": name for name in ("linear", "cosine", "exponential")}
    paper = {name: "paper" for name in rows if name.startswith("the paper's")}
    assert list(rows) == [*fixed, *schedules, *paper] and len(paper) == 1
    for name, variant in (fixed | schedules | paper).items():
        found = variants[variant]["sets"]["mixed"]
        f1 = [found[mode]["f1"] for mode in ("c8", "c32", "s32")]
        compare(rows[name], [*f1, found["c32"]["cosine"]], name)


def test_depths() -> None:
    variants = compared(0.45) | {"layers-8": compared(0.45)["base"]}
    rows = table("| layers |", PAPER)
    assert list(rows) == ["2", "4", "8", "16"]
    for layers, cells in rows.items():
        variant = variants[f"layers-{layers}"]
        size, speed = variant["parameters"] / 1e6, variant["per_second"] / 1e3
        f1 = [variant["sets"]["mixed"][mode]["f1"] for mode in ("c8", "c32", "beam")]
        compare(numbers(cells), [size, speed, variant["causal_loss"], *f1], layers)
    said = re.search(
        r"everything trained (\.\d+) by `beam`, the vocabulary frozen\s+(\.\d+), all but .+? (\.\d+)\.", PAPER
    )
    assert said is not None
    frozen = [variants[name]["sets"]["mixed"]["beam"]["f1"] for name in ("all", "embeddings", "backbone")]
    compare(list(said.groups()), frozen, "freezing")


def test_the_peer_in_the_same_run() -> None:
    def f1_of(variant: dict[str, Any], *modes: str) -> list[float]:
        return [average(variant["sets"].values(), mode, "f1") for mode in modes]

    rows = table("| trained for |", PEERS)
    minute, half = rows.values()
    early = results("compare-h200.json")["rounds"][1]
    assert early["minutes_each"] == 1
    before = {v["name"]: v for v in early["variants"]}
    expected = [*f1_of(before["gpt2"], "greedy"), *f1_of(before["base"], "c8", "c32")]
    compare(numbers(minute), expected, "a minute")
    now = compared(0.45)
    peer = f1_of(now["gpt2"], "greedy", "beam8")
    compare(numbers(half), [*peer, *f1_of(now["base"], "c8", "c32", "causal", "beam")], "half a minute")
    speed = now["gpt2"]["texts_per_second"]
    rows = table("| texts at once |", PEERS)
    assert list(rows) == list(speed)
    for size, cells in rows.items():
        expected = [speed[size][mode] for mode in ("greedy", "beam8", "ours8", "ours32")]
        compare(cells, expected, f"texts a second, {size} at once")

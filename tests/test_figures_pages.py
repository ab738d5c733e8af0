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
from test_readme import README, TABLES

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
ENCODERS = {"MiniLM": "all-MiniLM-L6-v2", "static": "static", "LSA": "ten-lsa"}


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
    names = {**TABLES["SETS"], "passages kept aside": "in_distribution"}
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
        [each["sets"][name] for name in TABLES["SETS"].values()]
        for each in results("encoders-h200.json")["encoders"]
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


@pytest.fixture
def ten() -> dict[str, Any]:
    """What was measured in ten languages, by the encoder's name on the page and the language."""
    runs = results("languages-h200.json")["encoders"]
    assert [run["encoder"] for run in runs] == list(ENCODERS.values())
    assert len({tuple(run["languages"]) for run in runs}) == len({run["minutes"] for run in runs}) == 1
    return {name: run["languages"] for name, run in zip(ENCODERS, runs, strict=True)}


def of_each(ten: dict[str, Any], mode: str, key: str, *languages: str) -> list[list[float]]:
    """A figure for each of the encoders, in these languages or in all."""
    return [[each[name]["all"][mode][key] for name in languages or each] for each in ten.values()]


def test_ten_languages(ten: dict[str, Any]) -> None:
    chance = results("languages-vocabulary.json")
    rows = table("| language | usual tokens: F1 | F1: MiniLM / static / LSA |")
    assert list(rows) == list(chance["languages"]) == list(ten["MiniLM"])
    for name, cells in rows.items():
        assert [len(numbers([cell])) for cell in cells] == [1, 3, 3, 3, 3, 3]
        keys = ("f1", "f1_known", "same_tokens", "cosine")
        own = [value for key in keys for (value,) in of_each(ten, "beam", key, name)]
        another = [chance["cosines"][encoder][name]["of_another_text"] for encoder in ENCODERS.values()]
        compare(numbers(cells), [chance["languages"][name]["f1_of_usual_tokens"], *own, *another], name)
    rows = table("| English inverter | " + " | ".join(ten["MiniLM"]) + " |")
    assert list(rows) == ["F1", "cosine"]
    for key, cells in zip(("f1", "cosine"), rows.values(), strict=True):
        compare(cells, [each["beside"]["beam"][key] for each in ten["MiniLM"].values()], key)
    runs = results("languages-h200.json")["encoders"]
    said = sentence(r"([\d.]+) minutes on one H200 \(([\d.]+)M, ([\d.]+)M and ([\d.]+)M passages, a tenth")
    compare(said, [runs[0]["minutes"], *(run["passages"] / 1e6 for run in runs)], "training")
    assert "none is without a vector" in PROSE
    assert not any(each["all"]["without_vector"] for rows in ten.values() for each in rows.values())


def test_ten_languages_by_strategy(ten: dict[str, Any]) -> None:
    usual = [
        each["f1_of_usual_tokens"] for each in results("languages-vocabulary.json")["languages"].values()
    ]
    for encoder, languages in ten.items():
        header = f"| {encoder}: strategy, passes | " + " | ".join(languages) + " | mean F1 | mean cosine |"
        rows = table(header)
        *cells, nothing = rows.pop("usual tokens")
        assert not nothing
        compare(cells, [*usual, mean(usual)], "usual tokens")
        assert list(rows) == list(STRATEGIES)
        found = [each["all"] for each in languages.values()]
        for name, cells in rows.items():
            mode = STRATEGIES[name]
            means = [average(found, mode, key) for key in ("f1", "cosine")]
            compare(cells, [*(each[mode]["f1"] for each in found), *means], f"{encoder}, {name}")


def test_what_is_said_of_ten_languages(ten: dict[str, Any]) -> None:
    chance = results("languages-vocabulary.json")
    others = [[chance["languages"][name]["f1_of_another_text"] for name in few] for few in (LETTERS, WORDS)]
    said = sentence(r"has (\.\d+) to (\.\d+) in ru, ar and ko, (\.\d+) to (\.\d+) in en, de, fr, es and pt")
    compare(said, [end(each) for each in others for end in (min, max)], "another text")
    letters = [value for each in of_each(ten, "beam", "f1", *LETTERS) for value in each]
    compare(sentence(r"F1 of (\.\d+) to (\.\d+) is of letters"), [min(letters), max(letters)], "letters")
    exact = [
        [each["all"][mode]["exact"] for each in rows.values() for mode in STRATEGIES.values()]
        for rows in ten.values()
    ]
    assert (
        [sum(each) for each in exact] == [ten["MiniLM"]["ru"]["all"]["beam"]["exact"], 0, 0] == [0.005, 0, 0]
    )
    said = sentence(r"Without it (\.\d+), (\.\d+) and (\.\d+) is of the common")
    compare(said, [value for (value,) in of_each(ten, "beam", "f1_known", "zh")], "zh")
    said = sentence(r"by `causal` (\.\d+), but (\.\d+) without \[UNK\].*?tokens, has (\.\d+) without \[UNK\]")
    causal, euler = (ten["static"]["zh"]["all"][mode] for mode in ("causal", "e32"))
    compare(said, [causal["f1"], causal["f1_known"], euler["f1_known"]], "static, zh")
    said = sentence(
        r"have (\.\d+) to (\.\d+) with MiniLM, (\.\d+) to (\.\d+) with the static encoder, "
        r"(\.\d+) to (\.\d+) with LSA; the usual tokens (\.\d+) to (\.\d+)"
    )
    usual = [chance["languages"][name]["f1_of_usual_tokens"] for name in WORDS[1:]]
    ranges = [end(each) for each in [*of_each(ten, "beam", "f1", *WORDS[1:]), usual] for end in (min, max)]
    compare(said, ranges, "pieces of words")
    said = sentence(
        r"Korean sentences have a cosine of (\.\d+) by the static encoder, Russian (\.\d+), Arabic (\.\d+)"
    )
    alike = chance["cosines"]["static"]
    compare(said, [alike[name]["of_another_text"] for name in ("ko", "ru", "ar")], "alike")
    said = sentence(
        r"have a cosine of (\.\d+) \(in ja (\.\d+)\); "
        r"of MiniLM's (\.\d+) \((\.\d+)\), of the static encoder's (1)\."
    )
    most = {name: chance["cosines"][encoder] for name, encoder in ENCODERS.items()}
    sought = [most[name][each]["of_the_tokens_sought"] for name in ("LSA", "MiniLM") for each in ("zh", "ja")]
    compare(said, [*sought, most["static"]["zh"]["of_the_tokens_sought"]], "the tokens sought")


def test_encoders_in_ten_languages(ten: dict[str, Any]) -> None:
    alike = ("s32", "t32", "e32", "r32", "causal")  # decoded as they were when MiniLM's run was made
    gains = {
        encoder: {
            name: [ten[encoder][name]["all"][m]["f1"] - ten["MiniLM"][name]["all"][m]["f1"] for m in alike]
            for name in ten[encoder]
        }
        for encoder in ("static", "LSA")
    }
    for gain in gains.values():
        assert all(min(gain[name]) > 0 for name in (*WORDS, "ru", "ar")) and max(gain["zh"]) < 0
    said = sentence(r"the static encoder's has (\.\d+) to (\.\d+) more, LSA's (\.\d+) to (\.\d+)\.")
    words = [[value for name in WORDS for value in gain[name]] for gain in gains.values()]
    compare(said, [end(each) for each in words for end in (min, max)], "gains")
    assert all(min(gains["static"][name]) < 0 < max(gains["static"][name]) for name in ("ja", "ko"))
    behind = {
        (name, mode)
        for name in ("ja", "ko")
        for mode, gain in zip(alike, gains["LSA"][name], strict=True)
        if gain < 0
    }
    assert behind == {("ja", "e32")}


def test_the_papers_strategies_in_ten_languages(ten: dict[str, Any]) -> None:
    four = ("s32", "t32", "e32", "r32")

    def best(encoder: str, key: str, *languages: str) -> str:
        found = [ten[encoder][name]["all"] for name in languages or ten[encoder]]
        return max(four, key=lambda mode: average(found, mode, key))

    means = {key: {name: best(name, key) for name in ten} for key in ("f1", "cosine")}
    assert means["cosine"] == {"MiniLM": "s32", "static": "e32", "LSA": "s32"}
    assert means["f1"] == {"MiniLM": "s32", "static": "t32", "LSA": "s32"}
    few = [name for name in ten["static"] if name not in ("zh", "ja", "ko")]
    assert {best(name, key, *few) for name in ten for key in means} == {"s32"}
    leads = {
        key: [(encoder, name, best(encoder, key, name)) for encoder in ten for name in ten[encoder]]
        for key in means
    }
    first = [sum(mode == "s32" for each, _, mode in leads["cosine"] if each == encoder) for encoder in ten]
    assert first == [9, 7, 9]
    two_stage = {key: [(e, name) for e, name, mode in leads[key] if mode == "t32"] for key in leads}
    assert two_stage["cosine"] == [("static", "ko")]
    assert two_stage["f1"] == [("static", "ko"), ("LSA", "en"), ("LSA", "zh")]

    found = {name: [each["all"] for each in rows.values()] for name, rows in ten.items()}
    said = sentence(r"Masking again helps `euler`: mean F1 \+(\.\d+), \+(\.\d+) and \+(\.\d+)\.")
    gains = {
        key: [average(each, "r32", key) - average(each, "e32", key) for each in found.values()]
        for key in means
    }
    compare(said, gains["f1"], "masking again")
    assert [gain > 0 for gain in gains["cosine"]] == [True, False, True]
    falls = [
        (encoder, name)
        for encoder in ten
        for name, each in ten[encoder].items()
        if each["all"]["r32"]["f1"] < each["all"]["e32"]["f1"] - 0.005
    ]
    assert falls == [("MiniLM", "zh"), ("static", "zh")]
    for each in found.values():
        f1 = {mode: average(each, mode, "f1") for mode in STRATEGIES.values()}
        assert sorted(f1, key=f1.__getitem__)[-2:] == ["causal", "beam"]
    said = sentence(
        r"for the static encoder \((\.\d+) and (\.\d+), (\.\d+) and (\.\d+)\) and LSA "
        r"\((\.\d+) and (\.\d+), (\.\d+) and (\.\d+)\), for MiniLM it was hardly so "
        r"\((\.\d+) and (\.\d+), (\.\d+) and (\.\d+)\)"
    )
    shown = [
        ten[encoder][name]["all"][mode]["f1"]
        for encoder in ("static", "LSA", "MiniLM")
        for name in ("ru", "ar")
        for mode in ("c32", "s32")
    ]
    compare(said, shown, "confidence and sequential")


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
    said = re.search(r"half a minute on a GPU\s+token F1 (\.\d+), and (\.\d+) from nothing", README)
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

"""What the README says is so: its figures stand in benchmarks/results, its links and commands exist."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from unembed.cli import COMMANDS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLES = runpy.run_path(str(ROOT / "recipes" / "tables.py"))


@pytest.mark.parametrize("name", TABLES["PAGES"])
def test_the_tables_are_those_that_the_recipe_fills_in(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    assert TABLES["fill"](page) == page
    marked = r"<!-- (figures|leaks): \S+ -->\n(.+?)<!-- end of \1 -->"
    spoilt = re.sub(marked, lambda found: re.sub(r"\.\d\d+|\d+ of", "9", found[0]), page, flags=re.DOTALL)
    assert len(re.findall(marked, page, flags=re.DOTALL)) == (2 if "peers" in name else 1)
    assert spoilt != page and TABLES["fill"](spoilt) == page


def test_a_table_shows_what_the_file_says() -> None:
    (part,) = json.loads((ROOT / "benchmarks/results/heldout-cpu.json").read_text(encoding="utf-8"))["parts"]
    assert {each["suite"] for each in part["figures"]} == set(TABLES["SETS"].values())
    assert all(f"| {name} | `beam` |" in README for name in TABLES["SETS"])
    (chat,) = (e for e in part["figures"] if (e["suite"], e["method"]) == ("persona_chat", "beam-32"))
    said = re.search(r"\| chat turns \| `beam` \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|", README)
    assert said is not None
    values = [chat["values"][key] for key in ("token_f1", "exact_match", "bleu", "cosine")]
    assert [float(figure) for figure in said.groups()] == pytest.approx(values, abs=0.0006, rel=0.002)


def test_the_numbers_and_dates_that_came_back_are_those_measured() -> None:
    page = (ROOT / "docs/peers.md").read_text(encoding="utf-8")
    (part,) = json.loads((ROOT / "benchmarks/results/heldout-cpu.json").read_text(encoding="utf-8"))["parts"]
    leaks = [leak for each in part["figures"] if each["method"] == "beam-32" for leak in each["leaks"]]
    counts = {
        kind: [sum(leak[key] for leak in leaks if leak["kind"] == kind) for key in ("recovered", "items")]
        for kind in ("number", "date")
    }
    said = re.search(r"whole \((\d+) of (\d+)\), of the dates (\w+) of (\d+)\.", page)
    assert said is not None and [int(said[1]), int(said[2])] == counts["number"]
    assert [{"none": "0"}.get(said[3], said[3]), said[4]] == [str(n) for n in counts["date"]]


def test_the_personal_data_that_came_back_is_that_measured() -> None:
    page = (ROOT / "docs/peers.md").read_text(encoding="utf-8")
    (part,) = json.loads((ROOT / "benchmarks/results/builtin-cpu.json").read_text(encoding="utf-8"))["parts"]
    (figures,) = part["figures"]
    said = re.search(r"token F1 (\.\d+), cosine (\.\d+); 95 %", page)
    assert said is not None
    values = [figures["values"][key] for key in ("token_f1", "cosine")]
    assert [float(n) for n in said.groups()] == pytest.approx(values, abs=0.0006)


def test_drafts_recover_as_much_as_it_says() -> None:
    parts = json.loads((ROOT / "benchmarks/results/drafts-cpu.json").read_text(encoding="utf-8"))["parts"]
    figures = [each for part in parts for each in part["figures"]]
    said = re.search(r"mean token F1 of (\.\d+), with 8 drafts (\.\d+), `beam` (\.\d+) ", README)
    assert said is not None
    for shown, method in zip(
        said.groups(), ("confidence-8", "confidence-8-drafts-8", "beam-32"), strict=True
    ):
        found = [e["values"]["token_f1"] for e in figures if e["method"] == method]
        assert len(found) == 5 and float(shown) == pytest.approx(sum(found) / 5, abs=0.0006)


def test_likeness_can_be_trusted_as_far_as_it_says() -> None:
    measured = json.loads((ROOT / "benchmarks/results/likeness-cpu.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8")
    table = page[page.index("## Likeness") : page.index("## Personal data")]
    rows = re.findall(r"^\| (?:below|from) (\.\d+) \| (.+) \|$", table, flags=re.MULTILINE)
    keys = "texts", "token_f1", "exact_match", "cosine"
    for (edge, cells), part in zip(rows, measured["parts"], strict=True):
        assert float(edge) == (part["from"] if part["from"] > 0 else measured["parts"][1]["from"])
        expected = [part[key] for key in keys]
        assert [float(cell) for cell in cells.split(" | ")] == pytest.approx(expected, abs=0.0006)
    said = re.search(r"correlation (\.\d+) with the true cosine, (\.\d+) with F1", table)
    assert said is not None
    correlation = [measured["correlation"][key] for key in ("cosine", "token_f1")]
    assert [float(n) for n in said.groups()] == pytest.approx(correlation, abs=0.0051)
    said = re.search(r"\.96 or more, token F1 is (\.\d+) on average, below \.90 it is (\.\d+)", README)
    assert said is not None
    low = [part for part in measured["parts"] if part["from"] < 0.9]  # the lowest alone are too few
    mean = sum(part["texts"] * part["token_f1"] for part in low) / sum(part["texts"] for part in low)
    high = measured["parts"][-1]["token_f1"]
    assert [float(n) for n in said.groups()] == pytest.approx([high, mean], abs=0.0051)


def test_defences_protect_as_far_as_it_says() -> None:
    measured = json.loads((ROOT / "benchmarks/results/defences-cpu.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/defences.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\w[^|]*) \| ([.\d]+ \|.+) \|$", page, flags=re.MULTILINE))
    assert rows.keys() == measured["defences"].keys()
    for name, figures in measured["defences"].items():
        *shown, neighbours = map(float, rows[name].split(" | "))
        assert shown == pytest.approx([figures[key] for key in ("f1", "exact", "cosine")], abs=0.0006)
        assert neighbours == pytest.approx(figures["neighbours"], abs=0.0051)
    assert f"{measured['texts']} texts" in page and f"among {measured['stored']:,}" in page
    half, none = (measured["defences"][name] for name in ("noise of 0.5 of its length", "none"))
    assert f"token F1 from {none['f1']:.2f} to {half['f1']:.2f}".replace("0.", ".") in README
    assert half["neighbours"] == pytest.approx(0.8, abs=0.01)  # a fifth is lost
    assert measured["defences"]["4 bits a number"]["f1"] == pytest.approx(none["f1"] - 0.04, abs=0.005)


def test_the_speed_is_that_measured() -> None:
    measured = json.loads((ROOT / "benchmarks/results/speed-cpu.json").read_text(encoding="utf-8"))
    inversion = measured["presets"]["small"]["inversion_texts_per_second"]
    said = re.search(r"passes: ([\d.]+) texts a second one at a time, ([\d.]+) in batches of 16", README)
    assert said is not None
    assert float(said[1]) == round(inversion["1"]["shipped"], 1)
    assert float(said[2]) == round(inversion["16"]["shipped"], 1)
    ratio = re.search(r"where it is ([\d.]+) times as\s+fast", README)
    assert ratio is not None and float(ratio[1]) == round(inversion["16"]["ratio"], 1)


def test_beams_are_as_fast_as_it_says() -> None:
    file = ROOT / "benchmarks/results/crew-cpu.json"
    speed = json.loads(file.read_text(encoding="utf-8"))["texts_per_second"]
    usual, wide, plain = (speed[name]["together"] for name in ("beam", "beam, 64 beams", "beam, no looks"))
    said = re.search(
        r"8 passes recover (\d+) texts a second together, `beam` recovers ([\d.]+), "
        r"with `--beams 64` ([\d.]+), with `--looks 0` ([\d.]+);[^(]*make the first ([\d.]+) times",
        README,
    )
    assert said is not None
    shown = [*(way["shipped"] for way in (usual, wide, plain)), usual["shipped"] / usual["neither"]]
    assert int(said[1]) == round(speed["confidence, 8 passes"]["together"]["shipped"])
    assert [float(part) for part in said.groups()[1:]] == [round(value, 1) for value in shown]


def test_beams_and_looks_recover_as_much_as_it_says() -> None:
    file = ROOT / "benchmarks/results/looks-h200.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    f1 = {
        (row["beams"], row["looks"]): sum(row["sets"][name]["token_f1"] for name in TABLES["SETS"].values())
        / 5
        for row in rows
    }
    said = re.search(
        r"Without looks token F1 is (\.\d+) lower; with `--beams 64` it is (\.\d+) higher", README
    )
    assert said is not None
    more = [f1[32, 4] - f1[32, 0], f1[64, 4] - f1[32, 4]]
    assert [float(part) for part in said.groups()] == pytest.approx(more, abs=0.0006)


def test_the_search_finds_as_much_as_it_says() -> None:
    results = ROOT / "benchmarks/results"
    sets = json.loads((results / "search-h200.json").read_text(encoding="utf-8"))["sets"]
    chat, web = sets["persona_chat"], sets["web_answers_msmarco"]
    sentence = (
        r"Of (\d+) chat turns it finds ([.\d]+) word for word within 5,000 calls of the\s+encoder, "
        r"and ([.\d]+) within 100; of (\d+) web answers ([.\d]+) and ([.\d]+) "
    )
    said = re.search(sentence, README)
    assert said is not None
    shown = [
        value
        for s in (chat, web)
        for value in (s["texts"], s["curve"]["5000"]["exact"], s["curve"]["100"]["exact"])
    ]
    assert [float(part) for part in said.groups()] == pytest.approx(shown, abs=0.005)
    right = sum(s["calibration"]["believed_and_exact"] for s in sets.values())
    believed = right + sum(s["calibration"]["believed_not_exact"] for s in sets.values())
    assert f"({right} of {believed})" in README
    speed = json.loads((results / "search-speed-cpu.json").read_text(encoding="utf-8"))
    said = re.search(r"search of (\d+) rounds x (\d+) candidates takes (\d+) seconds", README)
    assert said is not None
    shown = [speed["rounds"], speed["candidates"], round(speed["seconds_a_text"])]
    assert [int(part) for part in said.groups()] == shown


def test_the_page_of_the_search_shows_what_was_measured() -> None:
    page = (ROOT / "docs" / "search.md").read_text(encoding="utf-8")
    sets = json.loads((ROOT / "benchmarks/results/search-h200.json").read_text(encoding="utf-8"))["sets"]
    names = "persona_chat", "web_answers_msmarco", "science_claims_scifact", "in_distribution"
    table = page[page.index("## How much it finds") : page.index("## Ranked by a guess")]
    rows = re.findall(r"^\| ([\d,]+) \| (.+) \|$", table, flags=re.MULTILINE)
    assert [int(calls.replace(",", "")) for calls, _ in rows] == [1, 10, 100, 1000, 3200, 5000]
    for calls, cells in rows:
        points = [sets[name]["curve"][calls.replace(",", "")] for name in names]
        expected = [point[key] for point in points for key in ("exact", "f1", "cosine")]
        assert [float(cell) for cell in cells.split(" | ")] == pytest.approx(expected, abs=0.0051)
    for file, line in (
        ("search-eighth-cpu", "the encoder itself"),
        ("search-distilled-eighth-cpu", "and likelihood"),
    ):
        measured = json.loads((ROOT / f"benchmarks/results/{file}.json").read_text(encoding="utf-8"))["sets"]
        said = re.search(rf"\| ranked by .*?{line} \| (.+) \|", page)
        assert said is not None
        expected = [measured[name]["search"][key] for name in names[:2] for key in ("f1", "exact", "cosine")]
        assert [float(cell) for cell in said[1].split(" | ")] == pytest.approx(expected, abs=0.0006)


def test_a_search_by_the_model_s_own_guesses_finds_what_it_says() -> None:
    page = (ROOT / "docs" / "search.md").read_text(encoding="utf-8")
    file = ROOT / "benchmarks/results/search-self-twelfth-cpu.json"
    sets = json.loads(file.read_text(encoding="utf-8"))["sets"]
    names = {"chat turns": "persona_chat", "web answers": "web_answers_msmarco", "tweets": "tweets_tweeteval"}
    names["biomedical abstracts"] = "biomedical_pubmedqa"
    assert set(names.values()) == sets.keys()
    for title, name in names.items():
        said = re.search(rf"^\| {title} \| (.+) \|$", page, flags=re.MULTILINE)
        assert said is not None
        shown = [float(cell) for cell in said[1].split(" | ")]
        ways = sets[name]["open_loop"], sets[name]["search"]
        expected = [way[key] for way in ways for key in ("f1", "exact", "cosine")]
        assert shown == pytest.approx(expected, abs=0.0006)
    gain = sum(found["search"]["f1"] - found["open_loop"]["f1"] for found in sets.values()) / len(sets)
    told = re.search(r"`--refine self` .*? (\.\d+) more token F1", README, flags=re.DOTALL)
    assert told is not None and float(told[1]) == pytest.approx(gain, abs=0.0006)


def test_the_model_is_as_large_as_it_says() -> None:
    folder = ROOT / "src" / "unembed" / "models" / "all-MiniLM-L6-v2"
    shards = list(folder.glob("*.safetensors"))
    assert sum(p.stat().st_size for p in shards) <= 64_000_000
    assert max(p.stat().st_size for p in shards) <= 16 * 2**20
    assert "63M parameters" in README
    assert "63.2M parameters" in (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)\)", README))))
def test_links_lead_somewhere(link: str) -> None:
    assert link.startswith("http") or (ROOT / link).exists()


def test_commands_exist() -> None:
    known = {name for commands in COMMANDS.values() for name in commands}
    consoles = "\n".join(re.findall(r"```console\n(.*?)```", README, flags=re.DOTALL))
    used = set(re.findall(r"^unembed ([\w-]+)", consoles, flags=re.MULTILINE))
    assert used >= {"reconstruct", "invert", "encode", "prepare", "train"}
    assert used >= {"evaluate", "report", "compare"}
    assert used <= known
    targets = re.findall(r"^make (\w+)", consoles, flags=re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets and all(f"\n{target}:" in makefile for target in targets)

"""Records: what a file holds, that a run can be killed and gone on with, and who may add to a file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recovering import SHAPE, FakeEncoder, FakeInverter, make_tokenizer

from unembed import metrics
from unembed.backbone import build
from unembed.config import Config, ModelConfig
from unembed.errors import UnembedError
from unembed.evaluate import evaluate_suites, plan
from unembed.inverter import Inverter
from unembed.provenance import weights_digest
from unembed.records import FORMAT, RecordFile, Records, Row, read_records
from unembed.suites import Suite, suite_of

NOUNS, VERBS = ["cat", "dog", "bird", "mat", "road"], ["sat", "ran"]
TEXTS = [f"the {a} {n} {v} {p} a {m}" for a in ("old", "red", "small") for n in NOUNS for v in VERBS
         for p in ("on", "under") for m in NOUNS]  # fmt: skip
PLAN = plan(["confidence"], [8], config=SHAPE)


def run(
    out: Path | None, inverter: Inverter | None = None, texts: list[str] = TEXTS[:50], **options: Any
) -> Records:
    inverter = inverter or FakeInverter(make_tokenizer(), known=texts[::2])
    options = {"methods": PLAN, "batch_size": 8, "encoder": FakeEncoder(), **options}
    suites = options.pop("suites", None) or [suite_of(texts)]
    return evaluate_suites(suites, inverter=inverter, out=out, **options)


def untimed(records: Records) -> list[Row]:
    return [replace(row, seconds=0.0) for row in records.rows]


class Interrupted(FakeInverter):
    """Gives up at the n-th batch."""

    def __init__(self, *, batches: int, texts: list[str]) -> None:
        super().__init__(make_tokenizer(), known=texts[::2])
        self.left = batches + 1  # the first call warms up

    def invert(self, *args: Any, **options: Any) -> Any:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        return super().invert(*args, **options)


def tiny(*, causal: bool = False, embeds: bool = False) -> Inverter:
    """A real inverter of random weights, whose draws matter."""
    tokenizer = make_tokenizer()
    shape = ModelConfig(
        layers=1, hidden=32, heads=2, ffn=64, max_tokens=8, embedding_size=FakeEncoder.size, adaln_rank=0,
        vocab_size=tokenizer.size, mask_id=tokenizer.mask_id, end_id=tokenizer.end_id,
        pad_id=tokenizer.pad_id, causal=causal, embeds=embeds,
    )  # fmt: skip
    config = Config(model=shape, encoder="fake").override(embed_share=0.1 * embeds)
    torch.manual_seed(0)
    return Inverter(build(shape), config=config, tokenizer=tokenizer, device="cpu")


def test_as_many_beams_as_are_asked_for_are_kept() -> None:
    inverter, vectors = tiny(causal=True), FakeEncoder().encode(TEXTS[:20])
    found = {}
    for beams in (None, 1):
        methods = plan(["beam"], config=inverter.config.model, beams=beams)
        found[beams] = run(None, inverter, texts=TEXTS[:20], methods=methods).rows
        options: dict[str, Any] = {} if beams is None else {"beams": beams}
        passes = [one.forward_passes for one in inverter.invert(vectors, "beam", **options)]
        assert [row.forward_passes for row in found[beams]] == passes
    assert found[None] != found[1]
    with pytest.raises(UnembedError, match="beams must be a whole number from 1 to 128"):
        plan(["beam"], config=inverter.config.model, beams=129)


def test_warming_up_changes_no_answer() -> None:
    inverter, vectors = tiny(causal=True), FakeEncoder().encode(TEXTS[:10])
    search: dict[str, Any] = {"refine": "encoder", "rounds": 2, "candidates": 6, "pool": 3}
    methods = plan(["beam", "euler"], config=inverter.config.model, **search)
    rows = run(None, inverter, texts=TEXTS[:10], methods=methods).rows
    fresh, search["encoder"] = tiny(causal=True), FakeEncoder()
    found = [one for each in ("beam", "euler") for one in fresh.invert(vectors, each, seed=0, **search)]
    assert [(row.recovered, row.encoder_calls, row.forward_passes) for row in rows] == [
        (one.text, one.encoder_calls, one.forward_passes) for one in found
    ]


def test_records_from_before_likenesses_were_noted_are_gone_on_with(tmp_path: Path) -> None:
    out, inverter = tmp_path / "records.jsonl", tiny(causal=True, embeds=True)
    methods = plan(["beam", "euler"], config=inverter.config.model, baselines=["random"])
    options: dict[str, Any] = {"texts": TEXTS[:20], "methods": methods}
    whole = run(out, inverter, **options)
    guessed = [one.likeness for one in inverter.invert(FakeEncoder().encode(TEXTS[:20]), "beam")]
    assert [row.likeness for row in whole.rows] == guessed + [None] * 40 and None not in guessed
    header, *lines = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    older = [{key: value for key, value in line.items() if key != "likeness"} for line in lines[:8]]
    out.write_text("".join(json.dumps(line) + "\n" for line in [header, *older]), encoding="utf-8")
    again = run(out, inverter, **options)
    assert len(again.resumed) == 1 and untimed(again)[8:] == untimed(whole)[8:]
    assert [row.likeness for row in again.rows[:8]] == [None] * 8
    assert [row.recovered for row in again.rows] == [row.recovered for row in whole.rows]


def test_what_a_file_holds(tmp_path: Path) -> None:
    out = tmp_path / "new" / "records.jsonl"
    records = run(out, suites=[suite_of(TEXTS[:10], name="a", language="en"), suite_of(TEXTS[5:9], name="b")])
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [line["record"] for line in lines] == ["header", *["text"] * 14, "summary"]
    header = lines[0]
    assert header["versions"]["torch"] == torch.__version__
    assert header["versions"]["unembed"]
    assert header["hardware"]["device"] == "cpu" and header["hardware"]["precision"] == "fp32"
    settings = header["settings"]
    assert (settings["model"], settings["encoder"], settings["seed"]) == ("fake", "fake", 0)
    assert len(settings["weights"]) == 64
    assert [(s["name"], s["texts"], s["languages"]) for s in settings["suites"]] == [
        ("a", 10, ["en"]),
        ("b", 4, []),
    ]
    row = lines[1]
    assert (row["suite"], row["number"], row["language"], row["method"]) == ("a", 0, "en", "confidence-8")
    assert row["reference"] == TEXTS[0]
    assert {"recovered", "token_f1", "cosine", "forward_passes", "encoder_calls", "personal"} <= row.keys()
    figures = lines[-1]["figures"]
    assert [(f["suite"], f["texts"]) for f in figures] == [("a", 10), ("b", 4)]
    assert figures[0]["values"]["token_f1"] == pytest.approx(np.mean([r.token_f1 for r in records.rows[:10]]))
    assert figures[0]["bleu_tokenizers"] == {"en": "13a"}
    low, high = figures[0]["intervals"]["bleu"]
    assert low <= figures[0]["values"]["bleu"] <= high


def test_weights_have_a_hash_of_their_own() -> None:
    a, b = tiny(), tiny()
    assert weights_digest(a.model) == weights_digest(b.model)
    with torch.no_grad():
        next(b.model.parameters()).view(-1)[0] += 1
    assert weights_digest(a.model) != weights_digest(b.model)


@pytest.mark.parametrize("strategy", ["confidence", "euler"])
@pytest.mark.parametrize("kept", [0, 1, 3, 9])
def test_resumed_is_uninterrupted(tmp_path: Path, strategy: str, kept: int) -> None:
    methods = plan([strategy], [2, 4], baselines=["random", "unconditional"], config=SHAPE)
    inverter = tiny()
    whole = run(tmp_path / "whole.jsonl", inverter, texts=TEXTS[:20], methods=methods)
    assert len(whole.rows) == whole.expected == 80
    lines = (tmp_path / "whole.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    half = tmp_path / "half.jsonl"
    half.write_text("".join(lines[: 1 + 8 * kept + 3]), encoding="utf-8")  # whole batches and three rows more
    again = run(half, inverter, texts=TEXTS[:20], methods=methods)
    assert untimed(again) == untimed(whole)
    assert again.summary is not None and whole.summary is not None
    for one, other in zip(again.summary["figures"], whole.summary["figures"], strict=True):
        assert one | {"texts_per_second": 0} == other | {"texts_per_second": 0}
    assert len({row.recovered for row in whole.rows}) > 10  # the draws did matter


def test_the_batch_size_changes_no_draw() -> None:
    methods = plan(["euler"], [4], baselines=["random"], config=SHAPE)
    one, other = (run(None, tiny(), methods=methods, batch_size=n) for n in (7, 50))
    assert untimed(one) == untimed(other)


def test_nothing_is_computed_twice(tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(out, Interrupted(batches=3, texts=TEXTS[:50]))
    assert len(read_records(out).rows) == 24
    inverter, encoder = FakeInverter(make_tokenizer(), known=TEXTS[:50:2]), FakeEncoder()
    records = run(out, inverter, encoder=encoder)
    assert sum(call["count"] for call in inverter.calls[1:]) == 26
    assert [call["first"] for call in inverter.calls[1:]] == [24, 32, 40, 48]
    assert not set(TEXTS[:24]) & set(encoder.seen)
    assert [row.number for row in records.rows] == list(range(50))
    assert [(line["rows"], line["hardware"]["device"]) for line in records.resumed] == [(24, "cpu")]

    done = FakeInverter(make_tokenizer(), known=[])
    before = out.read_bytes()
    assert untimed(run(out, FakeInverter(make_tokenizer(), known=TEXTS[:50:2]))) == untimed(records)
    assert not done.calls and out.read_bytes() == before


@pytest.mark.parametrize("torn", ['{"record": "text", "meth', '{"record": "text"}', "\x00\x00\x00"])
def test_a_torn_line_is_dropped(tmp_path: Path, torn: str) -> None:
    out = tmp_path / "records.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(out, Interrupted(batches=2, texts=TEXTS[:50]))
    with out.open("a", encoding="utf-8") as file:
        file.write(torn)  # and no end of the line
    assert len(read_records(out).rows) == 16
    assert untimed(run(out)) == untimed(run(None))
    assert "meth\n" not in out.read_text(encoding="utf-8")


@pytest.mark.parametrize("beginning", ["", '{"record": "hea', '{"record": "header", "format": 1, "sett'])
def test_a_file_that_has_just_been_begun(tmp_path: Path, beginning: str) -> None:
    out = tmp_path / "records.jsonl"
    out.write_text(beginning, encoding="utf-8")
    assert len(run(out).rows) == 50


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": 1}, "seed 0, now 1"),
        ({"batch_size": 16}, "batch_size 8, now 16"),
        ({"methods": plan(["euler"], [8], config=SHAPE)}, "methods confidence-8, now euler-8"),
        ({"texts": TEXTS[1:51]}, "suites texts"),
        ({"model_name": "mine"}, "model 'fake', now 'mine'"),
        ({"inverter": tiny()}, "weights"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    out = tmp_path / "records.jsonl"
    run(out)
    before = out.read_bytes()
    with pytest.raises(UnembedError, match="was begun with other settings") as error:
        run(out, **options)
    assert said in str(error.value)
    assert out.read_bytes() == before


def test_records_from_before_there_were_drafts_and_beams_are_gone_on_with(tmp_path: Path) -> None:
    out, inverter = tmp_path / "records.jsonl", tiny()
    options: dict[str, Any] = {"texts": TEXTS[:20], "methods": plan(["euler"], [4], config=SHAPE)}
    whole = run(out, inverter, **options)
    header, *lines = out.read_text(encoding="utf-8").splitlines(keepends=True)
    newer = ', "drafts": 1, "beams": null, "looks": null'
    assert newer in header
    out.write_text("".join([header.replace(newer, ""), *lines[:8]]), encoding="utf-8")
    assert read_records(out).methods == options["methods"]
    again = run(out, inverter, **options)
    assert untimed(again) == untimed(whole) and len(again.resumed) == 1
    options["methods"] = plan(["euler"], [4], config=SHAPE, drafts=3)
    with pytest.raises(UnembedError, match="methods euler-4, now euler-4-drafts-3"):
        run(out, inverter, **options)
    drawn = run(None, inverter, **options)
    assert [row.recovered for row in drawn.rows] != [row.recovered for row in whole.rows]
    assert [row.recovered for row in drawn.rows] == [
        one.text for one in inverter.invert(FakeEncoder().encode(TEXTS[:20]), "euler", 4, drafts=3, seed=0)
    ]


def test_another_number_of_beams_is_another_setting(tmp_path: Path) -> None:
    out, inverter = tmp_path / "records.jsonl", tiny(causal=True)
    methods = plan(["beam", "euler"], config=inverter.config.model)
    whole = run(out, inverter, texts=TEXTS[:4], methods=methods)
    before = out.read_text(encoding="utf-8")
    assert untimed(run(out, inverter, texts=TEXTS[:4], methods=methods)) == untimed(whole)
    assert before.count('"beams": 32') == before.count('"beams": null') == 1
    out.write_text(before.replace('"beams": 32', '"beams": 16'), encoding="utf-8")
    with pytest.raises(UnembedError, match=r"other settings \(beam-8's beams 16, now 32\)"):
        run(out, inverter, texts=TEXTS[:4], methods=methods)


def test_what_cannot_be_read_again_is_no_place_for_records(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UnembedError, match="pipe is no file that can be gone on with; give the name of"):
        run(pipe)
    assert pipe.is_fifo()
    with pytest.raises(UnembedError, match="is a folder"):
        run(tmp_path)


def test_a_link_to_records_stays_a_link(tmp_path: Path) -> None:
    link, file = tmp_path / "link.jsonl", tmp_path / "file.jsonl"
    link.symlink_to(file)
    run(link)
    assert link.is_symlink() and read_records(file).summary is not None


def test_damage_in_the_middle_is_named(tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    run(out)
    lines = out.read_text(encoding="utf-8").splitlines()
    lines[5] = lines[5][:40]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(UnembedError, match="line 6 is damaged"):
        read_records(out)
    with pytest.raises(UnembedError, match="there is no file"):
        read_records(tmp_path / "none.jsonl")


def test_without_sacrebleu_bleu_is_left_out_and_filled_in_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "records.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(metrics, "has_bleu", lambda: False)
        first = run(out)
    assert first.summary is not None
    assert not first.summary["bleu"] and "bleu" not in first.summary["figures"][0]["values"]
    inverter = FakeInverter(make_tokenizer(), known=TEXTS[:50:2])
    again = run(out, inverter)
    assert again.summary is not None
    assert again.summary["bleu"] and again.summary["figures"][0]["values"]["bleu"] > 0
    assert not inverter.calls and untimed(again) == untimed(first)


KILLED = """
import sys
sys.path[:0] = sys.argv[2:]
from test_records import *
inverter = FakeInverter(make_tokenizer(), known=(TEXTS * 4)[:1000:2])
run(Path(sys.argv[1]), inverter, texts=(TEXTS * 4)[:1000], batch_size=20)
"""


def test_a_thousand_texts_killed_half_way(tmp_path: Path) -> None:
    out, texts = tmp_path / "records.jsonl", (TEXTS * 4)[:1000]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(out), str(Path(__file__).parent)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = time.monotonic() + 120
        while not out.exists() or out.read_bytes().count(b"\n") < 400:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    done = len(read_records(out).rows)
    assert 390 <= done < 1000
    inverter = FakeInverter(make_tokenizer(), known=texts[::2])
    inverter.pause = 0
    records = run(out, inverter, texts=texts, batch_size=20)
    assert sum(call["count"] for call in inverter.calls[1:]) == 1000 - done // 20 * 20
    assert [row.number for row in records.rows] == list(range(1000))
    assert untimed(records) == untimed(run(None, inverter, texts=texts, batch_size=20))
    assert records.summary is not None and records.summary["figures"][0]["texts"] == 1000


def test_one_run_at_a_time_writes_a_file(tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    header = {"settings": {"seed": 0}, "format": FORMAT}
    with RecordFile(out, header) as file:
        before = out.read_bytes()
        with pytest.raises(UnembedError, match="is being written by another run; wait"):
            RecordFile(out, header)
        assert out.read_bytes() == before
        file.finish({"bleu": False, "figures": []})
    with RecordFile(out, header) as file:  # done, so it may be gone on with
        assert file.known.summary is not None
    with pytest.raises(UnembedError, match="begun with other settings"):
        RecordFile(out, {"settings": {"seed": 1}, "format": FORMAT})
    RecordFile(out, header).__exit__()  # what was refused holds nothing


def test_suites_need_names_of_their_own() -> None:
    with pytest.raises(UnembedError, match="two suites are called 'texts'"):
        run(None, suites=[suite_of(["a"]), suite_of(["the"])])
    with pytest.raises(UnembedError, match="no text to evaluate"):
        evaluate_suites([], inverter=tiny(), methods=PLAN)


def test_a_row_survives_json(tmp_path: Path) -> None:
    suite = Suite("s", suite_of(["the cat ran 12 on the road"]).samples)
    (row,) = run(tmp_path / "r.jsonl", suites=[suite]).rows
    assert json.loads(json.dumps(asdict(row))) == asdict(row)
    assert row.personal == [{"kind": "number", "text": "12", "recovered": False}]

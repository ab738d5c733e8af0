"""The command line: every command, its JSON, and one clear sentence for each kind of bad input."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unembed.backbone import build
from unembed.cli import COMMANDS, EXTRAS, main
from unembed.cli.files import read_vectors
from unembed.config import PRESETS, Config, DiffusionConfig, ModelConfig, TrainConfig
from unembed.decode import decode
from unembed.encoders import Encoder, load_encoder
from unembed.inverter import Inverter
from unembed.strategies import STRATEGIES

SIZE = 384
TEXTS = [
    "The kettle clicked off just as the rain began.",
    "We left the umbrella on the bus.",
    "Could you pick up two lemons on your way home?",
    "The bakery sells out of rye bread before nine.",
    "My neighbour's cat has decided to move in.",
    "Nobody has seen the blue folder since Monday.",
    "The lift stops between the third and fourth floor.",
    "Her brother repairs clocks in a tiny workshop.",
]
LONG = "word " * 60
SMALL = "--layers 1 --hidden 32 --heads 2 --ffn 64 --batch-size 4 --adaln-rank 0".split()


class Result:
    """How a command ended and what it said."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def sentence(self) -> str:
        """The one line of stderr of a command that refused."""
        assert self.code == 2, self.err
        assert self.out == ""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("unembed: ")
        assert "Traceback" not in self.err
        return lines[0]


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process."""

    def run(*argv: object) -> Result:
        code = 0
        capsys.readouterr()
        try:
            main([str(token) for token in argv])
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return Result(code, said.out, said.err)

    return run


@pytest.fixture(scope="session")
def encoder() -> Encoder:
    """MiniLM with its real weights, loaded once."""
    return load_encoder("all-MiniLM-L6-v2", device="cpu")


@pytest.fixture(autouse=True)
def load_once(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every command the encoder that is loaded already; other names go the usual way."""

    def load(name: Any, **options: Any) -> Encoder:
        return encoder if name == encoder.name else load_encoder(name, **options)

    monkeypatch.setattr("unembed.encoders.load_encoder", load)


@pytest.fixture(scope="session")
def model(encoder: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random inverter, saved."""
    tokenizer = encoder.tokenizer  # type: ignore[attr-defined]
    shape = ModelConfig(
        layers=1,
        hidden=32,
        heads=2,
        ffn=64,
        adaln_rank=0,
        vocab_size=tokenizer.size,
        mask_id=tokenizer.mask_id,
        end_id=tokenizer.end_id,
        pad_id=tokenizer.pad_id,
        embedding_size=SIZE,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "random"
    Inverter(build(shape), config=Config(model=shape), tokenizer=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of texts."""
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of three random vectors."""
    path = tmp_path_factory.mktemp("vectors") / "v.npy"
    np.save(path, np.random.default_rng(0).normal(size=(3, SIZE)).astype(np.float32))
    return path


@pytest.fixture(scope="session")
def prepared(encoder: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared pairs of eight short texts."""
    from unembed.corpus import prepare

    folder = tmp_path_factory.mktemp("prepared") / "data"
    prepare(TEXTS, encoder=encoder, out=folder, max_tokens=12)
    return folder


def feed(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    """Put bytes on standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))


# --- help -----------------------------------------------------------------------------------------


def test_help_names_every_command(run: Run) -> None:
    result = run("--help")
    assert result.code == 0
    for commands in COMMANDS.values():
        for name, (_, summary, _) in commands.items():
            assert re.search(rf"{name} +{re.escape(summary)}", result.out)


@pytest.mark.parametrize("name", [name for commands in COMMANDS.values() for name in commands])
def test_every_command_has_help_and_json(run: Run, name: str) -> None:
    result = run(name, "--help")
    assert result.code == 0
    assert f"Usage: unembed {name}" in result.out
    assert "--json" in result.out


def test_help_of_train_is_the_help_of_the_settings(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = " ".join(run("train", "--help").out.split())
    for section in (ModelConfig, DiffusionConfig, TrainConfig):
        for f in fields(section):
            assert f"--{f.name.replace('_', '-')} " in shown
            assert f.metadata["help"] in shown


def test_version(run: Run) -> None:
    assert re.fullmatch(r"unembed \d+\.\d+\.\d+\n", run("--version").out)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["recontruct"], "reconstruct"),
        (["reconstruct", "--stepz", "3"], "--steps"),
        (["invert", "v.npy", "--steps", "many"], "many"),
        (
            ["reconstruct", "-5 degrees"],
            "unknown option: -5 degrees. -5 is not a recognized option. Texts that",
        ),
        (["reconstruct", "-5 degrees"], "Texts that begin with a dash go last, after --. See unembed"),
        (["reconstruct", "--so he said"], "Texts that begin with a dash go last, after --."),
        (["invert"], "needs a value for FILE"),
        (["train", "--preset", "tiny"], "needs a value for --data"),
        (["train", "--data", "x", "-o", "y", "--schedule", "linera"], "linear"),
    ],
)
def test_parse_errors(run: Run, argv: list[str], expected: str) -> None:
    assert expected in run(*argv).sentence


def test_a_misspelt_option_is_not_taken_for_a_text(run: Run) -> None:
    assert "dash" not in run("reconstruct", "--stepz", "3").sentence
    assert "dash" not in run("train", "-x").sentence


# --- reconstruct ----------------------------------------------------------------------------------


def test_reconstruct(run: Run, model: Path) -> None:
    result = run("reconstruct", *TEXTS[:2], "--model", model)
    assert result.code == 0
    assert result.err == ""
    for word in ("original", "recovered", "cosine", "confidence", "kettle", "umbrella"):
        assert word in result.out


def test_reconstruct_json(run: Run, model: Path) -> None:
    (record,) = run("reconstruct", TEXTS[0], "--model", model, "--json", "--steps", 4).json
    assert record["original"] == TEXTS[0]
    assert record["forward_passes"] == 4
    assert record["strategy"] == "confidence"
    assert -1 <= record["cosine"] <= 1
    assert 0 <= record["confidence"] <= 1
    assert len(record["confidences"]) > 0
    assert isinstance(record["recovered"], str)
    assert record["likeness"] is None  # this model does not guess


def test_a_model_that_guesses_vectors_says_so(
    run: Run, model: Path, vectors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    plain = Inverter.from_pretrained(model, device="cpu")
    config = plain.config.override(causal=True, embeds=True, embed_share=0.1)
    torch.manual_seed(0)
    guessing = Inverter(build(config.model), config=config, tokenizer=plain.tokenizer, device="cpu")
    guessing.save_pretrained(tmp_path / "m")
    found = guessing.invert(np.load(vectors))
    records = run("invert", vectors, "--model", tmp_path / "m", "--device", "cpu", "--json").json
    assert [r["likeness"] for r in records] == [pytest.approx(one.likeness, abs=1e-5) for one in found]
    argv = ("reconstruct", TEXTS[0], "--model", tmp_path / "m")
    (record,) = run(*argv, "--json").json
    live = run(*argv, "--live").out
    assert f"cosine {record['cosine']:.3f}   likeness {record['likeness']:.3f}   confidence" in live
    assert "likeness" not in run("reconstruct", TEXTS[0], "--model", model, "--live").out


def test_several_drafts_and_one_answer(run: Run, model: Path) -> None:
    argv = ("reconstruct", TEXTS[0], "--model", model, "--steps", 4, "--seed", 1)
    (record,) = run(*argv, "--drafts", 3, "--json").json
    assert (record["strategy"], record["forward_passes"]) == ("confidence", 12)
    assert run(*argv, "--json").json[0]["recovered"] != record["recovered"]
    live = run(*argv, "--drafts", 3, "--live")
    assert f"cosine {record['cosine']:.3f}" in live.out


def test_output_says_what_auto_was(run: Run, model: Path, encoder: Encoder, tmp_path: Path) -> None:
    def strategies(folder: Path, *options: str) -> list[str]:
        return [
            run("reconstruct", TEXTS[0], "--model", folder, "--json", "--seed", 0, *more).json[0]["strategy"]
            for more in (options, (*options, "--strategy", "auto"))
        ]

    assert strategies(model) == ["confidence"] * 2
    plain = Inverter.from_pretrained(model, device="cpu")
    reading = plain.config.override(causal=True)
    torch.manual_seed(0)
    Inverter(build(reading.model), config=reading, tokenizer=plain.tokenizer).save_pretrained(tmp_path / "m")
    assert strategies(tmp_path / "m") == ["beam"] * 2
    assert strategies(tmp_path / "m", "--temperature", "0.5") == ["causal"] * 2
    assert strategies(tmp_path / "m", "--steps", "4") == ["confidence"] * 2


def test_reconstruct_reads_standard_input(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for argv in (["-"], []):
        feed(monkeypatch, f"{TEXTS[0]}\n\n{TEXTS[1]}\n".encode())
        records = run("reconstruct", *argv, "--model", model, "--json", "--steps", 1).json
        assert [r["original"] for r in records] == TEXTS[:2]


def test_a_text_may_begin_with_a_dash(run: Run, model: Path) -> None:
    (record,) = run("reconstruct", "--model", model, "--json", "--steps", 1, "--", "-5 degrees").json
    assert record["original"] == "-5 degrees"


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["reconstruct"], "texts"),
        (["reconstruct", "x", "-"], "texts"),
        (["encode", "-"], "texts"),
        (["prepare", "-", "-o", "data"], "texts"),
        (["evaluate", "-"], "texts"),
        (["invert", "-"], "vectors"),
    ],
)
def test_who_has_to_type_is_told_so(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    feed(monkeypatch, b"")
    assert "standard input is empty" in run(*argv).sentence  # and nothing else
    feed(monkeypatch, b"")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    first, second = run(*argv).err.splitlines()
    assert first == f"unembed: reading {what} from here, one a line, until Ctrl-D"
    assert "standard input is empty" in second


def test_live_ends_in_what_invert_returns(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    live = run("reconstruct", TEXTS[0], "--model", model, "--live")
    (record,) = run("reconstruct", TEXTS[0], "--model", model, "--json").json
    assert live.code == 0
    assert TEXTS[0] in live.out
    assert f"{SIZE} numbers" in live.out
    assert f"cosine {record['cosine']:.3f}" in live.out
    assert "░" not in live.out


def test_live_and_json_are_refused(run: Run) -> None:
    assert "choose one" in run("reconstruct", "x", "--live", "--json").sentence


def test_no_model_is_bundled(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unembed.checkpoint.bundled_models", dict)
    sentence = run("reconstruct", "x").sentence
    assert "--model" in sentence
    assert "unembed train" in sentence


def test_bundled_model_is_found(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unembed.checkpoint.bundled_models", lambda: {"all-MiniLM-L6-v2": model})
    (record,) = run("reconstruct", TEXTS[0], "--json").json
    assert record["original"] == TEXTS[0]
    (row,) = run("models", "--json").json
    assert (row["name"], row["encoder"], row["max_tokens"]) == ("all-MiniLM-L6-v2",) * 2 + (32,)
    assert "all-MiniLM-L6-v2" in run("models").out


def test_long_text_is_cut_with_a_note(run: Run, model: Path) -> None:
    for extra in ("--json", "--live"):
        result = run("reconstruct", LONG, "--model", model, "--steps", 1, extra)
        assert result.code == 0
        assert result.err == "unembed: note: 1 of 1 texts are longer than 32 tokens and were cut.\n"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["", "--steps", 2], "blank"),
        (["x", "--steps", 0], "at least 1"),
        (["x", "--steps", 33], "between 1 and 32"),
        (["x", "--strategy", "confidense"], "'confidence'"),
        (["x", "--temperature", -1], "temperature"),
        (["x", "--guidance", "nan"], "guidance"),
        (["x", "--remask", 2], "remask"),
        (["x", "--restart", -0.5], "restart"),
        (["x", "--reveal", "sine"], "reveal"),
        (["x", "--beams", 129], "beams must be a whole number from 1 to 128"),
        (["x", "--drafts", 0], "drafts must be a whole number from 1 to 64"),
        (["x", "--strategy", "beam", "--drafts", 2], "leave drafts out"),
        (["x", "--drafts", 2, "--temperature", 0], "all would be the same"),
        (["x", "--strategy", "beam", "--temperature", 0.5], "leave temperature out"),
        (["x", "--strategy", "beam", "--beams", 4], "does not read left to right, as beam does"),
        (["x", "--strategy", "confidence", "--beams", 4], "--beams concerns beam; add --strategy beam, or"),
        (["x", "--remask", 0.1], "--remask concerns euler-remask"),
        (["x", "--batch-size", 0], "--batch-size must be at least 1, not 0. See unembed reconstruct --help."),
        (["x", "--batch-size", -3], "must be at least 1, not -3"),
        (["x", "--live", "--pace", "nan"], "--pace must be a number of seconds, 0 or more, not nan."),
        (["x", "--live", "--pace", -1], "not -1"),
        (["x", "--pace", 2], "--pace concerns --live; add --live, or leave it out."),
        (["x", "--seed", -1], "seed"),
        (["x", "--encoder", "all-minilm-l7-v2"], "'all-MiniLM-L6-v2'"),
        (["x", "--device", "gpu"], "unknown device"),
        (["x", "--device", "cuda:77"], "no device cuda:77"),
    ],
)
def test_bad_options_of_reconstruct(run: Run, model: Path, argv: list[object], expected: str) -> None:
    assert expected in run("reconstruct", *argv, "--model", model).sentence


def test_jina_needs_trust(run: Run, model: Path) -> None:
    assert (
        "--trust-remote-code"
        in run("reconstruct", "x", "--model", model, "--encoder", "jina-embeddings-v3").sentence
    )


# --- models that are none ---------------------------------------------------------------------------


def test_bad_models(run: Run, model: Path, vectors: Path, tmp_path: Path) -> None:
    def said(folder: Path | str) -> str:
        return run("invert", vectors, "--model", folder).sentence

    assert "unknown model" in said("nothing-here")
    assert "is a file" in said(vectors)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json" in said(empty)

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"architectures": ["BertModel"]}')
    assert "not written by unembed" in said(foreign)

    pickled = tmp_path / "pickled"
    pickled.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (pickled / file.name).write_bytes(file.read_bytes())
    assert "no weights" in said(pickled)
    (pickled / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    assert "pickle" in said(pickled)

    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in model.iterdir():
        raw = file.read_bytes()
        (damaged / file.name).write_bytes(raw[: len(raw) // 2] if file.suffix == ".safetensors" else raw)
    assert "damaged" in said(damaged)


# --- invert ---------------------------------------------------------------------------------------


def test_invert_formats_agree(
    run: Run, model: Path, vectors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow
    from pyarrow import parquet

    array = np.load(vectors)
    rows = array.tolist()
    np.savez(tmp_path / "v.npz", vectors=array)
    np.savez(tmp_path / "two.npz", first=array, second=array[::-1])
    parquet.write_table(pyarrow.table({"id": [1, 2, 3], "embedding": rows}), tmp_path / "v.parquet")
    (tmp_path / "lists.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    objects = [json.dumps({"id": i, "embedding": row}) for i, row in enumerate(rows)]
    (tmp_path / "objects.jsonl").write_text("\n".join(objects) + "\n\n")
    named = [json.dumps({"mine": row}) for row in rows]
    (tmp_path / "named.jsonl").write_text("\n".join(named))

    expected = run("invert", vectors, "--model", model).out
    assert len(expected.splitlines()) == 3
    cases: list[list[object]] = [
        [tmp_path / "v.npz"],
        [tmp_path / "v.parquet"],
        [tmp_path / "v.parquet", "--column", "embedding"],
        [tmp_path / "lists.jsonl"],
        [tmp_path / "objects.jsonl"],
        [tmp_path / "named.jsonl", "--column", "mine"],
    ]
    for argv in cases:
        assert run("invert", *argv, "--model", model).out == expected, argv
    reverse = run("invert", tmp_path / "two.npz", "--key", "second", "--model", model).out
    assert reverse.splitlines() == expected.splitlines()[::-1]
    for file in (vectors, tmp_path / "v.npz", tmp_path / "v.parquet", tmp_path / "lists.jsonl"):
        feed(monkeypatch, Path(file).read_bytes())
        assert run("invert", "-", "--model", model).out == expected, file


@pytest.mark.parametrize(
    "ids", [np.arange(3), np.array(["a", "b", "c"]), np.array([1, "b", None], dtype=object)]
)
def test_vectors_are_found_beside_their_ids(vectors: Path, tmp_path: Path, ids: np.ndarray) -> None:
    array, file = np.load(vectors), tmp_path / "v.npz"
    np.savez(file, ids=ids, scores=np.ones(3), pairs=np.ones((3, 2), dtype=int), found=array)
    assert np.array_equal(read_vectors(str(file)), array)


def test_which_array_is_meant_has_to_be_clear(run: Run, vectors: Path, tmp_path: Path) -> None:
    array, file = np.load(vectors), tmp_path / "v.npz"
    for arrays in ({"ids": np.arange(3), "whole": array.astype(int)}, {"ids": array, "whole": array}):
        np.savez(file, **arrays)
        said = (
            f"{file} holds several arrays (ids, whole), and which of them holds vectors cannot be told; name"
        )
        assert f"{said} it with --key." in run("invert", file).sentence
        assert read_vectors(str(file), key="whole").shape == array.shape


def test_invert_json_and_output(run: Run, model: Path, vectors: Path, tmp_path: Path) -> None:
    argv = ("invert", vectors, "--model", model, "--strategy", "euler", "--seed", 1, "--json")
    records = run(*argv).json
    assert len(records) == 3
    for record in records:
        assert {"text", "ids", "confidences", "likeness", "strategy", "forward_passes"} <= record.keys()
        assert (record["strategy"], record["forward_passes"]) == ("euler", 8)
        assert len(record["ids"]) == len(record["confidences"])
    target = tmp_path / "new" / "out.json"
    result = run(*argv, "-o", target)
    assert result.out == ""
    assert json.loads(target.read_text()) == records
    assert [p.name for p in target.parent.iterdir()] == ["out.json"]


def test_invert_of_one_vector(run: Run, model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.ones(SIZE))
    assert len(run("invert", tmp_path / "one.npy", "--model", model).out.splitlines()) == 1


def test_invert_writes_into_a_pipe(run: Run, model: Path, vectors: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        result = run("invert", vectors, "--model", model, "-o", pipe)
        got = os.read(reader, 2**16).decode()
    finally:
        os.close(reader)
    assert (result.code, got) == (0, run("invert", vectors, "--model", model).out)
    assert pipe.is_fifo()
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]


def test_vectors_go_into_a_pipe(run: Run, texts: Path, tmp_path: Path, encoder: Encoder) -> None:
    pipe = tmp_path / "v.npy"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert run("encode", texts, "-o", pipe).code == 0
        found = np.load(io.BytesIO(os.read(reader, 2**16)))
    finally:
        os.close(reader)
    np.testing.assert_allclose(found, encoder.encode(TEXTS), atol=1e-5)


def test_a_link_stays_a_link(run: Run, model: Path, vectors: Path, tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    for _ in range(2):  # to nothing, then to a file
        assert run("invert", vectors, "--model", model, "-o", link).code == 0
    assert link.is_symlink() and len(file.read_text().splitlines()) == 3
    assert {p.name for p in tmp_path.iterdir()} == {"link", "file"}


def test_standard_output_by_its_name_is_written_on(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from unembed.whole import whole_file\n"
        "with whole_file(Path('log')) as out: out.write(b'now')"
    )
    log = tmp_path / "log"
    log.write_text("before, ")
    with log.open("ab") as stdout:
        subprocess.run([sys.executable, "-c", code], stdout=stdout, cwd=tmp_path, check=True)
        stdout.write(b", after")
    assert log.read_text() == "before, now, after"


# Nothing that these commands name is there, so that to begin with the work would be said first.
TO_FILES = (["invert", "missing.npy"], ["encode", "missing.txt"])
TO_FOLDERS = (
    ["prepare", "missing.txt"],
    ["train", "--data", "missing"],
    ["train", "--data", "missing", "--resume"],
    ["train-encoder", "missing"],
    ["report", "missing.jsonl"],
)


@pytest.mark.parametrize("argv", [*TO_FILES, *TO_FOLDERS], ids=" ".join)
def test_an_output_is_refused_before_the_work(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    def said(name: str) -> str:
        sentence = run(*argv, "-o", tmp_path / name).sentence
        assert sentence.startswith(f"unembed: --output must be a {kind} that can be written")
        assert f"not {tmp_path / name} (" in sentence
        assert sentence.endswith(f"See unembed {argv[0]} --help.")
        return sentence

    kind = "file" if argv in TO_FILES else "folder"
    file = tmp_path / "file.npy"
    file.write_text("mine")
    (tmp_path / "folder.npy").mkdir()
    assert "(file.npy is no folder)" in said("file.npy/deep/out.npy")
    assert (
        "(it is a folder)" in said("folder.npy") if kind == "file" else "(it is no folder)" in said(file.name)
    )
    monkeypatch.setattr("unembed.whole.os.access", lambda *_: False)
    assert "(permission denied)" in said("new.npy")
    assert "(permission denied)" in said("new/er/out.npy")
    if kind == "file":
        assert "(permission denied)" in said("file.npy")
    assert file.read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file.npy", "folder.npy"]


@pytest.mark.parametrize("argv", TO_FOLDERS, ids=" ".join)
def test_standard_output_is_no_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "not - (it is standard output)" in run(*argv, "-o", "-").sentence
    assert not list(tmp_path.iterdir())


def test_texts_do_not_take_the_place_of_their_vectors(
    run: Run, model: Path, vectors: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "v.npy"
    mine.write_bytes(vectors.read_bytes())
    assert "holds the vectors" in run("invert", mine, "--model", model, "-o", mine).sentence
    assert mine.read_bytes() == vectors.read_bytes()


def test_who_waits_sees_that_something_is_done(
    run: Run, model: Path, vectors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []

    def waiting(what: str) -> nullcontext[None]:
        waited.append(what)
        return nullcontext()

    monkeypatch.setattr("unembed.cli.recover.waiting", waiting)
    monkeypatch.setattr("unembed.cli.recover.at_terminal", lambda: True)
    for argv in (["invert", vectors], ["reconstruct", *TEXTS[:3]]):
        one = run(*argv, "--model", model, "--steps", 1)
        several = run(*argv, "--model", model, "--steps", 1, "--batch-size", 2)
        assert (one.err, "inverting (batches)" in several.err) == ("", True)
    assert waited == ["inverting", "recovering"]


def bad_vectors(folder: Path) -> Iterator[tuple[str, str]]:
    """Write files of bad vectors; give each with a word of its refusal."""
    good = np.ones((2, SIZE), dtype=np.float32)

    def save(name: str, array: np.ndarray) -> str:
        np.save(folder / name, array, allow_pickle=array.dtype == object)
        return str(folder / name)

    def dump(name: str, content: str | bytes) -> str:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return str(folder / name)

    broken, zero = good.copy(), good.copy()
    broken[1, 3], zero[1] = np.nan, 0.0
    yield save("size.npy", np.ones((2, 5))), f"expected (N, {SIZE})"
    yield save("deep.npy", np.ones((2, 2, SIZE))), "shape (2, 2, 384)"
    yield save("nan.npy", broken), "vector 1 holds NaN"
    yield save("zero.npy", zero), "vector 1 is all zeros"
    yield save("none.npy", np.ones((0, SIZE))), "no vectors"
    yield save("number.npy", np.array(1.0)), "holds a single number"
    yield save("objects.npy", np.array([{}, {}], dtype=object)), "pickled"
    yield save("words.npy", np.array(["a", "b"])), "not numbers"
    yield dump("empty.npy", ""), "empty"
    for ending in (".npy", ".npz", ".parquet"):
        yield dump(f"noise{ending}", "this is only text"), f"is no {ending} file"
    yield dump("array.npz", (folder / "size.npy").read_bytes()), "is no .npz file"
    yield dump("cut.npy", (folder / "size.npy").read_bytes()[:100]), "cannot be read as .npy"
    with zipfile.ZipFile(folder / "text.npz", "w") as archive:
        archive.writestr("notes.txt", "these are no vectors")
    yield str(folder / "text.npz"), "not numbers"
    np.savez_compressed(folder / "whole.npz", np.arange(9.0 * SIZE).reshape(9, SIZE))
    packed = (folder / "whole.npz").read_bytes()
    yield dump("spoilt.npz", packed[:200] + b"\xff" * 40 + packed[240:]), "cannot be read as .npz"
    yield dump("cut.npz", b"PK\x03\x04"), "cannot be read as .npz"
    yield dump("cut.parquet", "PAR1"), "cannot be read as .parquet"
    yield dump("v.pkl", b"\x80\x04N."), "pickle"
    yield dump("v.csv", "1,2,3"), ".npy, .npz, .parquet, .jsonl"
    yield dump("words.jsonl", '["a", "b"]'), "line 1 is not a list of numbers"
    yield dump("text.jsonl", "hello"), "line 1 is not JSON"
    yield dump("uneven.jsonl", "[1, 2]\n[1]"), "line 2 has 1 numbers"
    yield dump("spaced.jsonl", "\n[1, 2]\n\n[1]"), "line 4 has 1 numbers, but line 2 has 2;"
    yield dump("mixed.jsonl", "\n[1]\n\n\n7"), "line 5 is not a list of numbers"
    yield dump("field.jsonl", '{"text": "x"}'), "--column"
    yield dump("nan.jsonl", json.dumps([float("nan")] * SIZE)), "vector 0 holds NaN"
    yield dump("huge.jsonl", f"[{'1' * 400}{', 1' * (SIZE - 1)}]"), "vector 0 holds NaN or infinity"
    yield dump("large.jsonl", f"[1e300{', 1' * (SIZE - 1)}]"), "vector 0 holds NaN or infinity"
    yield str(folder / "missing.npy"), "there is no file"
    yield str(folder), "cannot read"


def test_bad_vectors(run: Run, model: Path, tmp_path: Path) -> None:
    for file, expected in bad_vectors(tmp_path):
        assert expected in run("invert", file, "--model", model).sentence, file


def test_bad_keys_and_columns(run: Run, vectors: Path, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    np.savez(tmp_path / "v.npz", first=np.load(vectors))
    assert "'first'" in run("invert", tmp_path / "v.npz", "--key", "frist").sentence
    parquet.write_table(pyarrow.table({"id": [1], "embedding": [[1.0]]}), tmp_path / "v.parquet")
    assert "'embedding'" in run("invert", tmp_path / "v.parquet", "--column", "embeding").sentence
    assert "not a list of numbers" in run("invert", tmp_path / "v.parquet", "--column", "id").sentence
    parquet.write_table(pyarrow.table({"id": [1]}), tmp_path / "w.parquet")
    assert "no column of lists" in run("invert", tmp_path / "w.parquet").sentence
    assert "--key is for .npz, not .npy; leave it out." in run("invert", vectors, "--key", "a").sentence
    assert "--column is for .parquet and .jsonl" in run("invert", vectors, "--column", "zz").sentence
    (tmp_path / "lists.jsonl").write_text("[1, 2]\n")
    assert "has no fields" in run("invert", tmp_path / "lists.jsonl", "--column", "zz").sentence


def test_empty_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("invert", "encode", "reconstruct"):
        feed(monkeypatch, b"\n")
        assert "standard input is empty" in run(command, "-").sentence


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="permissions do not bind this user")
def test_unreadable_file(run: Run, vectors: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.npy"
    secret.write_bytes(vectors.read_bytes())
    secret.chmod(0)
    assert "secret.npy" in run("invert", secret).sentence


def test_full_disk_while_writing_text(
    run: Run, model: Path, vectors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.txt"
    target.write_text("before")
    monkeypatch.setattr("unembed.whole.os.fsync", full_disk)
    sentence = run("invert", vectors, "--model", model, "-o", target).sentence
    assert "disk is full" in sentence
    assert target.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["out.txt"]


def full_disk(*args: object, **kwargs: object) -> None:
    """Fail as a full disk does."""
    raise OSError(errno.ENOSPC, "No space left on device")


# --- encode ---------------------------------------------------------------------------------------


def test_encode(run: Run, texts: Path, tmp_path: Path, encoder: Encoder) -> None:
    target = tmp_path / "v.npy"
    summary = run("encode", texts, "--encoder", "all-MiniLM-L6-v2", "-o", target, "--json").json
    assert (summary["texts"], summary["embedding_size"]) == (len(TEXTS), SIZE)
    expected = encoder.encode(TEXTS)
    np.testing.assert_allclose(np.load(target), expected, atol=1e-5)
    lines = run("encode", texts, "--limit", 2).out.splitlines()
    np.testing.assert_allclose([json.loads(line) for line in lines], expected[:2], atol=1e-5)
    assert len(run("encode", texts, "--json", "--limit", 2).json) == 2
    assert run("encode", texts, "--limit", 2, "-o", "-").out.splitlines() == lines


@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".parquet"])
def test_encode_says_what_it_left_out(run: Run, tmp_path: Path, encoder: Encoder, ending: str) -> None:
    import pyarrow
    from pyarrow import parquet

    file, lines = tmp_path / f"texts{ending}", [TEXTS[0], "", TEXTS[1], " ", TEXTS[2], ""]
    if ending == ".parquet":
        parquet.write_table(pyarrow.table({"text": lines}), file)
    else:
        rows = [json.dumps({"text": x}) if x and ending == ".jsonl" else x for x in lines]
        file.write_text("\n".join(rows) + "\n")
    result = run("encode", file, "--json")
    np.testing.assert_allclose(result.json, encoder.encode(TEXTS[:3]), atol=1e-5)
    said = "of {} texts are blank and were left out; rows are numbered without them\n"
    assert result.err == f"unembed: note: 3 {said.format(6)}"
    assert run("encode", file, "--limit", 2).err == f"unembed: note: 1 {said.format(3)}"
    assert run("encode", file, "--limit", 1).err == ""


def test_encode_pipes_into_invert(
    run: Run, texts: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, run("encode", texts).out.encode())
    assert len(run("invert", "-", "--model", model).out.splitlines()) == len(TEXTS)


def test_bad_input_of_encode(run: Run, texts: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "a.jsonl").write_text('{"body": "x"}')
    target = tmp_path / "v.npy"
    assert "is empty" in run("encode", tmp_path / "empty.txt", "-o", target).sentence
    assert "not UTF-8" in run("encode", tmp_path / "latin.txt", "-o", target).sentence
    assert "body" in run("encode", tmp_path / "a.jsonl", "-o", target).sentence
    assert "there is no file" in run("encode", tmp_path / "missing.txt", "-o", target).sentence
    assert "'all-MiniLM-L6-v2'" in run("encode", texts, "--encoder", "MiniLM-L6-v2", "-o", target).sentence
    assert ".npy" in run("encode", texts, "-o", tmp_path / "v.csv").sentence
    assert "limit" in run("encode", texts, "-o", target, "--limit", 0).sentence
    assert not target.exists()


# --- prepare --------------------------------------------------------------------------------------


def test_prepare(run: Run, texts: Path, tmp_path: Path) -> None:
    argv = ("prepare", texts, "-o", tmp_path / "data", "--tokens", 6, "--limit", 4)
    summary = run(*argv, "--json").json
    assert (summary["kind"], summary["texts"], summary["max_tokens"]) == ("pairs", 4, 6)
    assert summary["truncated"] > 0
    assert "4 pairs for all-MiniLM-L6-v2" in run(*argv).out  # again: nothing is left to do
    more = run("prepare", texts, "-o", tmp_path / "data", "--tokens", 6, "--json").json
    assert more["texts"] == len(TEXTS)


def test_prepare_passages_with_a_tokenizer(run: Run, texts: Path, model: Path, tmp_path: Path) -> None:
    argv = ("prepare", texts, "-o", tmp_path / "data", "--passages", "--tokenizer", model, "--json")
    assert (run(*argv).json["kind"], run(*argv).json["embedding_size"]) == ("passages", SIZE)


def test_bad_input_of_prepare(run: Run, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    (tmp_path / "empty.txt").write_text("\n")
    assert "--dataset" in run("prepare", "-o", out).sentence
    assert "--dataset" in run("prepare", texts, "--dataset", "c4", "-o", out).sentence
    assert "unknown dataset" in run("prepare", "--dataset", "c5", "-o", out).sentence
    assert "is empty" in run("prepare", tmp_path / "empty.txt", "-o", out).sentence
    assert "max_tokens" in run("prepare", texts, "-o", out, "--tokens", 0).sentence
    assert "unknown encoder" in run("prepare", texts, "-o", out, "--encoder", "x").sentence
    assert "tokenizer" in run("prepare", texts, "-o", out, "--tokenizer", texts).sentence
    assert not (out / "manifest.json").exists()


def test_prepare_can_be_stopped(
    run: Run, texts: Path, tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    argv = ("prepare", texts, "-o", tmp_path / "data")
    with monkeypatch.context() as patch:
        patch.setattr(type(encoder), "encode", press)
        result = run(*argv)
    assert (result.code, result.out) == (130, "")
    assert result.err == "unembed: stopped; run the same command again to go on.\n"
    assert run(*argv).code == 0


# --- train ----------------------------------------------------------------------------------------


def test_train_then_reconstruct(run: Run, prepared: Path, tmp_path: Path) -> None:
    argv = ("train", "--preset", "tiny", "--data", prepared, "-o", tmp_path / "run", *SMALL)
    result = run(*argv, "--steps", 3, "--learning-rate", 3e-4, "--no-stratified", "--json")
    assert result.code == 0
    assert (result.json["steps"], result.json["interrupted"]) == (3, False)
    config = Config.from_json((tmp_path / "run" / "model" / "config.json").read_text())
    assert (config.model.layers, config.model.max_tokens) == (1, 12)
    assert (config.train.learning_rate, config.diffusion.stratified) == (3e-4, False)
    assert config.train.pairs == "cached"
    (record,) = run("reconstruct", "A text.", "--model", result.json["model"], "--json").json
    assert record["original"] == "A text."

    assert "--resume" in run(*argv, "--steps", 3).sentence
    further = run("train", "--data", prepared, "-o", tmp_path / "run", "--resume", "--steps", 5)
    assert "5 steps" in further.out
    assert "unembed reconstruct --model" in further.err
    other = run("train", "--data", prepared, "-o", tmp_path / "run", "--resume", "--hidden", 64)
    assert "hidden" in other.sentence


def test_a_run_that_was_killed_while_it_saved_can_be_resumed(
    run: Run, prepared: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    argv = ("--data", prepared, "-o", out)
    assert run("train", "--preset", "tiny", *argv, *SMALL, "--steps", 2).code == 0
    aside = out / ".state-old-1"  # as a kill between the two moves leaves it
    aside.mkdir()
    (out / "state").rename(aside / "state")
    assert run("train", *argv, "--resume", "--steps", 4, "--json").json["steps"] == 4
    assert not aside.exists()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--preset", "tinny"], "'tiny'"),
        (["--preset", "tiny", "--layers", 0], "layers must be at least 1"),
        (["--preset", "tiny", "--hidden", 100, "--heads", 3], "not a multiple"),
        (["--preset", "tiny", "--mask-ratio", 2], "mask_ratio"),
        (["--preset", "tiny", "--seed", -1], "seed must be between 0 and"),
        (["--preset", "tiny", "--seed", 10**23], "seed must be between 0 and"),
        (
            ["--preset", "tiny", "--max-tokens", 16],
            "prepared with max_tokens 12, not 16; leave --max-tokens out",
        ),
        (["--preset", "tiny", *SMALL, "--learning-rate", 1e30], "diverged"),
        (["--resume"], "no run to resume"),
        (["--preset", "tiny", "--validation", 100], "--validation"),
        (["--preset", "tiny", "--pairs", "fresh"], "passages"),
        (["--preset", "tiny", "--start-from", "nowhere"], "nowhere"),
    ],
)
def test_bad_settings(run: Run, prepared: Path, tmp_path: Path, argv: list[object], expected: str) -> None:
    result = run("train", "--data", prepared, "-o", tmp_path / "run", *argv)
    assert expected in result.sentence
    assert not (tmp_path / "run" / "model").exists()


def test_data_that_is_none(run: Run, tmp_path: Path) -> None:
    argv = ("train", "--preset", "tiny", "--data", tmp_path, "-o", tmp_path / "run")
    assert "manifest.json" in run(*argv).sentence


def test_full_disk_while_saving(
    run: Run, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("run", "checkpoint"):
        monkeypatch.setattr(import_module(f"unembed.{module}"), "save_file", full_disk)
    out = tmp_path / "run"
    result = run("train", "--preset", "tiny", "--data", prepared, "-o", out, *SMALL, "--steps", 1)
    assert "disk is full" in result.sentence
    assert sorted(p.name for p in out.iterdir()) == ["metrics.jsonl"]


def test_interrupted_training_can_be_resumed(run: Run, prepared: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    argv = ["train", "--preset", "tiny", "--data", str(prepared), "-o", str(out), *SMALL]
    process = subprocess.Popen(
        [sys.executable, "-m", "unembed", *argv, "--steps", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = time.monotonic() + 60
        while not ((out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, stdout) == (130, "")
    last = stderr.splitlines()[-1]
    step = int(re.search(r"stopped at step (\d+)", last)[1])  # type: ignore[index]
    assert last.endswith(f": unembed train --data {prepared} -o {out} --resume")
    again = run(
        *last.partition("unembed train ")[2].join(["train ", ""]).split(), "--steps", step + 2, "--json"
    )
    assert again.json["steps"] == step + 2


# --- evaluate -------------------------------------------------------------------------------------


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


# --- what there is --------------------------------------------------------------------------------


def test_presets(run: Run) -> None:
    rows = run("presets", "--json").json
    assert {row["name"] for row in rows} == set(PRESETS)
    for row in rows:
        assert row["layers"] == PRESETS[row["name"]].model.layers
        assert row["hidden_size"] == PRESETS[row["name"]].model.hidden
        assert row["vocabulary"] == PRESETS[row["name"]].model.vocab_size
        assert 0 < row["trainable_parameters"] <= row["total_parameters"]
    modes = [row["freeze"] for row in rows if row["name"] == "mmbert-22"]
    assert modes == ["none", "embeddings", "backbone"]
    assert "mmbert-22" in run("presets").out


def test_strategies_and_encoders(run: Run) -> None:
    assert [row["name"] for row in run("strategies", "--json").json] == list(STRATEGIES)
    assert "MaskGIT" in run("strategies").out
    assert "auto, the default, is beam" in run("strategies").err
    sizes = {row["name"]: row["embedding_size"] for row in run("encoders", "--json").json}
    assert sizes["all-MiniLM-L6-v2"] == SIZE
    assert "jina-embeddings-v3" in run("encoders").out


def test_doctor(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run("doctor", "--json").json
    assert report["ok"]
    assert report["self_test"] == dict.fromkeys(STRATEGIES, "ok")
    assert report["packages"]["torch"] == torch.__version__
    assert f"{SIZE} numbers" in report["encoder"]
    monkeypatch.setattr(Inverter, "invert", full_disk)
    result = run("doctor")
    assert result.code == 1
    assert "failed" in result.out


# --- how it ends ----------------------------------------------------------------------------------


def test_ctrl_c(run: Run, model: Path, vectors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def press(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Inverter, "invert", press)
    result = run("invert", vectors, "--model", model)
    assert (result.code, result.out, result.err) == (130, "", "unembed: stopped.\n")


def test_ctrl_c_keeps_the_texts_of_finished_batches(
    run: Run, model: Path, vectors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("invert", vectors, "--model", model, "--strategy", "euler", "--seed", 1, "--batch-size", 2)
    lines, records = run(*argv).out.splitlines(), run(*argv, "--json").json
    target, begun = tmp_path / "out.txt", list[object]()

    def press(*args: Any, **options: Any) -> Any:
        begun.append(None)
        if len(begun) % 2 == 0:
            raise KeyboardInterrupt
        return decode(*args, **options)

    monkeypatch.setattr("unembed.inverter.decode", press)
    shown, printed, written = run(*argv), run(*argv, "--json"), run(*argv, "-o", target)
    assert [shown.code, printed.code, written.code] == [130] * 3
    assert (shown.out.splitlines(), printed.json, written.out) == (lines[:2], records[:2], "")
    assert target.read_text().splitlines() == lines[:2]
    more = "the first 2 of 3 texts; for the others, invert the vectors after them.\n"
    assert shown.err == printed.err == f"unembed: stopped: stdout holds {more}"
    assert written.err == f"unembed: stopped: {target} holds {more}"


def test_missing_extra_is_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "v.parquet").write_bytes(b"PAR1")
    assert "pip install 'unembed[data]'" in run("invert", tmp_path / "v.parquet").sentence
    assert EXTRAS["pyarrow"] == "data"


def test_a_bug_keeps_its_traceback(
    run: Run, model: Path, vectors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Inverter, "invert", fail)
    with pytest.raises(ZeroDivisionError):
        run("invert", vectors, "--model", model)


def test_quiet_when_the_reader_has_gone() -> None:
    code = "import sys; from unembed.cli import main; main(['--version'])"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=30) in (0, 1, 141)


def test_output_that_does_not_fit(tmp_path: Path) -> None:
    pytest.importorskip("resource")  # Unix
    code = (
        "import resource; from unembed.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); main(['--version'])"
    )
    with (tmp_path / "out").open("wb") as stdout:
        result = subprocess.run(
            [sys.executable, "-c", code], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert result.returncode == 2
    assert result.stderr == (
        "unembed: could not write all of the output: file too large; make room, or send it elsewhere.\n"
    )


def test_options_of_decoding_are_usual_where_the_library_s_are() -> None:
    from unembed.cli.options import Decoding
    from unembed.decode import DecodeOptions

    # Written twice, since the command line must not wait for torch before it can say what it takes.
    ours, theirs = vars(Decoding()), vars(DecodeOptions())
    assert {key: ours[key] for key in theirs} == theirs

"""`unembed invert`: every format of vectors, and one clear sentence for each kind of bad ones."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from cli.commands import SIZE, TEXTS, Run, feed, full_disk
from unembed.cli.files import read_vectors
from unembed.encoders import Encoder


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

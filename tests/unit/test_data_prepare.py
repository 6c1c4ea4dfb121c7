"""From text to a dataset: every source, exact, the same bytes whatever happens on the way."""

import csv
import errno
import gzip
import io
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.spec import AbstractBufferedFile
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.processors import TemplateProcessing

from config import TitaniteError
from data import prepare as prepare_module
from data import sources, token_files, workers, writer
from data.place import Place
from data.prepare import main
from data.shards import DataError
from data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from tests.corpus import documents_in, prepare, stored_blocks, write_dataset
from tools import verify

ROOT = Path(__file__).parents[2]
SEPARATOR = "\n=====\n"
WORDS = ["the", "quick", "naïve", "日本語", "def f(x):\n    return x\n", "🙂", "<|endoftext|>", "  ", "\r\n"]
STOP = pytest.raises(KeyboardInterrupt)

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 60))) + f" {i}" for i in range(400)]


@pytest.fixture(scope="module")
def tokenizer_folder(texts, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(texts, 400).save(folder)
    return folder


@pytest.fixture
def make(tokenizer_folder, tmp_path) -> Make:
    """Prepares sources in this process, and returns the dataset's folder."""

    def make(*given: object, output: str = "out", **options: object) -> Path:
        defaults = {"tokenizer": tokenizer_folder, "processes": 1}
        prepare([str(source) for source in given], str(tmp_path / output), **defaults | options)
        return tmp_path / output

    return make


@pytest.fixture
def lines(texts, tmp_path) -> Path:
    """The texts as JSON lines."""
    return write_jsonl(tmp_path / "in.jsonl", texts)


def write_jsonl(path: Path, texts) -> Path:
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    return path


def decoded(folder: Path, split: str) -> list[str]:
    """The documents of a split, each checked to end with its only eos."""
    tokenizer = load_tokenizer(folder)
    documents = list(chain.from_iterable(stored_blocks(folder, split)))
    assert all(document.index(tokenizer.eos_id) == len(document) - 1 for document in documents)
    return [tokenizer.decode(document) for document in documents]


def documents_of(folder: Path) -> Counter[str]:
    return Counter(decoded(folder, "train") + decoded(folder, "validation"))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def cut_off() -> Any:
    """In its context a preparation is interrupted before its manifest."""
    return patch("data.writer.write_manifest", side_effect=KeyboardInterrupt)


def start_script(path: Path, code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start data.prepare with small units and these arguments, after `code`, in a process of its own."""
    begin = (
        "import os, signal; from pathlib import Path; from data import prepare, sources\nsources.UNIT_BYTES = 20_000\n"
    )
    end = f"if __name__ == '__main__':\n    prepare.main({[str(argument) for argument in arguments]!r})\n"
    path.write_text(begin + code + end)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, str(path)], env=environment, stderr=subprocess.PIPE, text=True)


def compressed(name: str, content: bytes) -> bytes:
    """As the suffix of `name` says."""
    if name.endswith(".zst"):
        return pa.compress(content, codec="zstd", asbytes=True)
    return gzip.compress(content) if name.endswith(".gz") else content


TABLES = {
    "Arrow file": ("a.arrow", pa.ipc.new_file),
    "Arrow stream": ("a.arrow", pa.ipc.new_stream),
    "unnamed Arrow file": ("a.tokens", pa.ipc.new_file),
    "Parquet": ("a.parquet", pq.ParquetWriter),
}


def write_table(folder: Path, kind: str, rows_at_once: int = 3, **columns: Any) -> Path:
    name, writer_of = TABLES[kind]
    table = pa.table(columns)
    with writer_of(folder / name, table.schema) as file:
        for first in range(0, len(table), rows_at_once):
            file.write_table(table.slice(first, rows_at_once))
    return folder / name


@pytest.fixture
def inputs(texts, tmp_path) -> Path:
    """The same documents in every kind of source."""
    folder = tmp_path / "in"
    (folder / "files").mkdir(parents=True)
    for i, text in enumerate(texts):
        (folder / "files" / f"{i:04}.md").write_bytes(text.encode())
    content = write_jsonl(folder / "a.jsonl", texts).read_bytes()
    for name in ("a.jsonl.gz", "a.jsonl.zst"):
        (folder / name).write_bytes(compressed(name, content))
    for kind in ("Arrow file", "Parquet"):
        write_table(folder, kind, 64, n=range(len(texts)), text=texts)
    (folder / "one.txt").write_bytes(SEPARATOR.join(texts).encode())
    os.mkfifo(folder / "pipe")
    for name, half in (("b1.jsonl", texts[:200]), ("b2.jsonl", texts[200:])):
        fsspec.filesystem("memory").pipe_file(f"{folder}/{name}", write_jsonl(folder / name, half).read_bytes())
    return folder


@pytest.mark.parametrize(
    "source",
    [
        "files",
        "a.jsonl.gz",
        "a.jsonl.zst",
        "a.arrow",
        "a.parquet",
        "one.txt",
        "memory:/",
        "memory:/b?.jsonl",
        "a.jsonl|pipe",
        "one.txt|pipe",
        "Python",
    ],
)
def test_every_source_gives_each_document_once(inputs, texts, make, tmp_path, monkeypatch, source):
    monkeypatch.setattr(sources, "UNIT_BYTES", 3000)  # many units, cut in the middle of lines
    options: dict[str, Any] = {"validation_fraction": 0.1}
    if "one.txt" in source:
        options["separator"] = SEPARATOR.replace("\n", "\\n")
    piped, _, name = source.rpartition("|")
    if piped:
        threading.Thread(target=lambda: (inputs / "pipe").write_bytes((inputs / piped).read_bytes())).start()
    if source == "Python":
        prepare_module.prepare((text for text in texts), str(tmp_path / "out"), processes=1, **options)
    else:
        make(name.replace("memory:", f"memory:/{inputs}") if "memory" in name else inputs / name, **options)
    output = tmp_path / "out"
    assert documents_of(output) == Counter(texts)
    assert 15 < len(decoded(output, "validation")) < 75
    numbers = [int(text.rpartition(" ")[2]) for text in decoded(output, "train")]  # in the order of the input
    for later in (range(len(numbers)), [*numbers[1:], numbers[0]]):  # shuffled, and not file by file
        assert abs(np.corrcoef(numbers, later)[0, 1]) < 4 / len(numbers) ** 0.5
    assert not list(output.glob(".*.*"))
    verify.main([str(output)])


def test_the_held_out_documents_depend_on_their_text_alone(texts, make, tmp_path):
    """Whatever the order, how often a text comes, and into how many pieces it is cut."""
    held_out = []
    for order, longest in ((texts, 0), (texts[::-1] + texts[:50], 0), (texts, 40)):
        file = write_jsonl(tmp_path / "in.jsonl", order)
        folder = make(file, overwrite=True, validation_fraction=0.2, max_characters=longest)
        held_out.append(decoded(folder, "validation"))
        assert longest or not {*held_out[-1]} & {*decoded(folder, "train")}
    whole, repeated, pieces = held_out
    assert {*whole} == {*repeated}
    assert Counter(pieces) == Counter(piece for text in whole for piece in prepare_module.cut(text, 40))
    assert len(pieces) > len(whole) > 40


def test_long_texts_are_cut_at_line_ends_and_nothing_is_lost() -> None:
    text = "".join(f"line {i} {'x' * (i % 37)}\n" for i in range(500)) + "y" * 3000
    cut = list(prepare_module.cut(text, 1000))
    assert "".join(cut) == text
    assert all(len(piece) <= 1000 and (piece.endswith("\n") or {*piece} == {"y"}) for piece in cut)
    assert sum(len(piece) < 900 for piece in cut) <= 2
    assert list(prepare_module.cut(text, 0)) == [text]


def test_the_same_bytes_by_any_number_of_processes_and_parts(texts, make, tmp_path, monkeypatch):
    file = write_jsonl(tmp_path / "in.jsonl", texts * 3)
    monkeypatch.setattr(sources, "UNIT_BYTES", 100_000)
    sizes = {"shard_mb": 0.01, "block_mb": 0.004, "validation_fraction": 0.1}
    whole, shared = (contents(make(file, output=f"{n}", processes=n, **sizes)) for n in (1, 3))
    monkeypatch.setattr(prepare_module, "HELD_BYTES", 1)  # each unit in several parts
    monkeypatch.setattr(prepare_module, "BATCH_BYTES", 500)
    assert whole == shared == contents(make(file, **sizes))
    assert "train-00001.arrow" in whole


def test_no_process_needs_pandas(lines, tokenizer_folder, tmp_path):
    """Its import takes half a second, and pyarrow's usual conversions import it."""
    words = [f"--source={lines}", f"--output={tmp_path / 'out'}", f"--tokenizer={tokenizer_folder}", "--processes=2"]
    process = start_script(tmp_path / "run.py", "import sys; sys.modules['pandas'] = None\n", *words)
    said = process.communicate()[1]
    assert process.returncode == 0, said


def test_the_next_batch_is_read_meanwhile():
    reads_on = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        reads_on.set()
        yield 2
        raise ValueError("unreadable")

    ahead = workers.read_ahead(items())
    assert next(ahead) == 1
    assert reads_on.wait(20)
    assert next(ahead) == 2
    with pytest.raises(ValueError, match="unreadable"):
        next(ahead)


def test_examples_are_counted_over_all_units(texts, make, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "UNIT_BYTES", 5000)
    rows = [json.dumps({"prompt": "say", "response": text}) for text in texts]
    (tmp_path / "in.jsonl").write_text("\n".join(rows))
    manifest = json.loads((make(tmp_path / "in.jsonl", format="sft", seq_len=2048) / "manifest.json").read_bytes())
    assert manifest["conversations"] == manifest["examples"] == len(texts)


@pytest.mark.parametrize("name", ["a.txt", "a.html.zst", "a.jsonl.gz"])
def test_a_byte_order_mark_is_no_text_and_zeros_after_gzip_are_no_content(name, tmp_path):
    content = b"\xef\xbb\xbf" + (b'{"text": "def f():"}' if "jsonl" in name else b"def f():")
    stored = compressed(name, content[:5]) + compressed(name, content[5:])
    (tmp_path / name).write_bytes(stored + bytes(1000 * name.endswith("gz")))
    assert documents_in(tmp_path / name) == ["def f():"]


def read_in_units(path: Path, separator: str = "", unit_bytes: int = 2**22, read_bytes: int = 2**20) -> list[str]:
    """The documents of a file, unit after unit."""
    with patch.object(sources, "UNIT_BYTES", unit_bytes), patch.object(sources, "READ_BYTES", read_bytes):
        return documents_in(path, separator=separator)


LETTERS = "ab\né"  # few, so that separators often occur and overlap
SEPARATORS = ["\n\n", "aa", "abab", "aabaa", "aba", "\n---\n", "<|end|>", "é", "a\n", "\n"]


@settings(max_examples=150)
@given(
    st.sampled_from(SEPARATORS) | st.text(LETTERS, min_size=1, max_size=5),
    st.lists(st.text(LETTERS, max_size=12), max_size=8),
    st.lists(st.integers(0, 3), min_size=7, max_size=7),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
@example("\n\n", ["a", "b"], [2, *[0] * 6], 5, 5, "\n", False)  # five line ends, and a unit ends after them
@example("aba", ["", "ba", "b"], [1] * 7, 1, 1, "\n", False)  # begins with it, overlaps it
@example("\n\n", ["a", "\nb"], [1] * 7, 3, 1, "\r\n", True)
def test_separators_divide_as_python_does_whatever_the_units(
    tmp_path_factory, separator, parts, repeats, unit_bytes, read_bytes, line_end, has_bom
):
    text = "".join(part + separator * count for part, count in zip(parts, [*repeats, 0], strict=False))
    path = tmp_path_factory.getbasetemp() / "divided.txt"
    path.write_bytes(text.replace("\n", line_end).encode("utf-8-sig" if has_bom else "utf-8"))
    expected = [document for document in text.split(separator) if document.strip()]
    assert read_in_units(path, separator, unit_bytes, read_bytes) == [d.replace("\n", line_end) for d in expected]


@pytest.mark.parametrize(
    ("separator", "content", "documents"),
    [
        ("\n---\n", b"one\r\n---\r\ntwo\n---\r\nthree\r", ["one", "two", "three\r"]),
        ("\r\n---\r\n", b"one\n---\ntwo\r\n---\r\nthree", ["one", "two", "three"]),
        ("\r", b"one\rtwo\r\nthree\n", ["one", "two", "\nthree\n"]),  # of old Macs: as it is
        ("\n", b"one\r\r\ntwo\rtwo\n", ["one\r", "two\rtwo"]),
        ("---", b"---one---\xef\xbb\xbftwo---", ["one", "\ufefftwo"]),  # a byte order mark begins a file only
        ("---", b"", []),
    ],
)
@pytest.mark.parametrize("unit_bytes", [1, 100])
def test_line_ends_of_a_separator_match_lf_and_crlf(tmp_path, separator, content, documents, unit_bytes):
    (tmp_path / "a.txt").write_bytes(content)
    assert read_in_units(tmp_path / "a.txt", separator, unit_bytes, 1) == documents


def test_a_reader_that_knows_nothing_of_units_gets_whole_files(tmp_path, monkeypatch):
    """As one that a fork adds: a suffix, and a branch of `_records`, which would repeat what it reads in each unit."""
    monkeypatch.setitem(sources.KINDS, ".numbers", "numbers")
    lines_of = lambda file, kind, raw, *_: ((i, {"text": line.decode()}) for i, line in enumerate(raw))  # noqa: E731
    monkeypatch.setattr(sources, "_records", lines_of)
    numbers = [f"{i}\n" for i in range(1000)]
    (tmp_path / "a.numbers").write_text("".join(numbers))
    assert read_in_units(tmp_path / "a.numbers", unit_bytes=100) == numbers
    with pytest.raises(DataError, match=r"a\.numbers, row 0: no text under 'body'; it has text"):
        documents_in(tmp_path / "a.numbers", ["body"])


# ---------------------------------------------------------------- kills


@pytest.mark.parametrize("changed", ["file", "tokenizer", "option"])
def test_parts_that_another_input_made_are_not_used(texts, lines, make, tmp_path, monkeypatch, changed):
    """A file of the same size, say, with lines in another order: some would come twice and others never."""
    monkeypatch.setattr(sources, "UNIT_BYTES", 2_000)
    with patch("data.prepare._write_bucket", side_effect=KeyboardInterrupt), STOP:
        make(lines)
    options: dict[str, Any] = {}
    if changed == "file":
        later = lines.stat().st_mtime_ns + 10**9
        write_jsonl(lines, texts[::-1])
        os.utime(lines, ns=(0, later))
    elif changed == "tokenizer":
        train_tokenizer(texts, 300).save(tmp_path)
        options["tokenizer"] = tmp_path
    else:
        options["max_characters"] = 40
    assert contents(make(lines, **options)) == contents(make(lines, **options, output="whole"))


@pytest.mark.parametrize("progress", ["unit-", "bucket-"])
def test_after_sigkill_the_same_command_finishes_with_the_same_bytes(
    lines, make, tokenizer_folder, tmp_path, monkeypatch, progress
):
    monkeypatch.setattr(sources, "UNIT_BYTES", 20_000)
    whole = contents(make(lines, shard_mb=0.02, output="whole"))
    output = tmp_path / "killed"
    # It kills itself right after the third record of progress: no race with a process that watches it.
    code = (
        "real, seen = Path.replace, []\n"
        "def replace(path, target):\n"
        "    real(path, target)\n"
        f"    seen.extend([target] * target.name.startswith({progress!r}))\n"
        "    if len(seen) == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "Path.replace = replace\n"
    )
    options = "--processes=1", "--shard-mb=0.02", f"--tokenizer={tokenizer_folder}"
    killed = start_script(tmp_path / "killed.py", code, f"--source={lines}", f"--output={output}", *options)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert not (output / "manifest.json").exists()
    done = {path.name for path in output.glob(f".parts/{progress}*")}
    assert len(done) == 3
    watched, real = [], Path.replace
    monkeypatch.setattr(Path, "replace", lambda path, target: (watched.append(target.name), real(path, target)))
    assert contents(make(lines, shard_mb=0.02, output="killed")) == whole
    assert not done & {*watched}, "finished parts are not made again"


def test_the_workers_of_a_killed_run_end_with_it(texts, lines, make, tokenizer_folder, tmp_path):
    """They were stopped before they wrote. If they went on, they would write beside a new start."""
    (tmp_path / "pids").mkdir()
    code = (
        "def stop():\n"
        f"    open({str(tmp_path / 'pids')!r} + f'/{{os.getpid()}}', 'w').close()\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "prepare._write_part = lambda *part: stop()\n"
    )
    options = "--processes=2", f"--tokenizer={tokenizer_folder}"
    parent = start_script(tmp_path / "killed.py", code, f"--source={lines}", f"--output={tmp_path / 'out'}", *options)
    while len(pids := [int(file.name) for file in (tmp_path / "pids").iterdir()]) < 2:
        assert parent.poll() is None
    while not all(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "T" for pid in pids):
        pass
    workers = [os.pidfd_open(pid) for pid in pids]
    parent.kill()
    parent.communicate()
    ended = [select.select([worker], [], [], 20)[0] for worker in workers]
    for worker in workers:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(worker, signal.SIGKILL)
        os.close(worker)
    assert all(ended)
    assert documents_of(make(lines)) == Counter(texts)


@pytest.mark.parametrize("cut", ["at the end", "at another start"])
def test_a_kill_while_parts_are_removed_loses_no_document(texts, lines, make, tmp_path, monkeypatch, cut):
    monkeypatch.setattr(sources, "UNIT_BYTES", 5000)
    at_the_end = cut == "at the end"

    def cut_short(parts, **_):
        for file in (*Path(parts).glob("bucket-*"), *Path(parts).glob("unit-000001*")):
            file.unlink()
        raise KeyboardInterrupt

    if not at_the_end:
        with cut_off(), STOP:
            make(lines)
    with patch("shutil.rmtree", cut_short), STOP:
        make(lines, block_mb=8 if at_the_end else 0.01)
    assert not at_the_end or not [*tmp_path.glob("out/.parts/part-*")], "no start would take them up"
    assert documents_of(make(lines, overwrite=at_the_end)) == Counter(texts)


def test_a_worker_that_the_system_kills_is_one_line(lines, tokenizer_folder, tmp_path):
    code = "prepare._write_part = lambda *_: os.kill(os.getpid(), 9)\n"
    words = [f"--source={lines}", f"--output={tmp_path / 'out'}", f"--tokenizer={tokenizer_folder}", "--processes=2"]
    process = start_script(tmp_path / "killed.py", code, *words)
    said = process.communicate()[1]
    assert process.returncode == 1
    assert "error: the system killed a worker" in said
    assert "Traceback" not in said


def test_the_files_of_others_in_the_folder_are_kept(lines, make, tmp_path):
    """Also those that the Hugging Face Hub names much as we name shards."""
    others = ["train-00000-of-00002.parquet", "train-00000.arrow.bak", "train-0.arrow"]
    shards = ["train-00099.arrow", "train-00099.lengths", ".validation-00001.arrow.tmp", "train-100000.arrow"]
    (tmp_path / "out").mkdir()
    for name in (*others, *shards):
        (tmp_path / "out" / name).write_bytes(b"old")
    left = contents(make(lines))
    assert all(left[name] == b"old" for name in others)
    assert not left.keys() & {*shards}


def test_a_folder_is_written_by_one_process_and_replaced_only_when_asked_and_never_read_in_part(lines, make, tmp_path):
    with (
        writer.locked(Place(str(tmp_path / "out"))),
        pytest.raises(DataError, match="/out: another process is writing there"),
    ):
        make(lines)
    before = contents(make(lines))
    with pytest.raises(DataError, match="already holds a finished dataset; give --overwrite"):
        make(lines)
    assert contents(tmp_path / "out") == before
    with cut_off(), STOP:
        make(lines, overwrite=True)
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert contents(make(lines, overwrite=True)) == before


def test_every_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """A kill leaves no tokenizer without its eos, and no dataset half."""
    done, fsync, replace = [], os.fsync, Path.replace

    def sync(file: int) -> None:
        fsync(file)
        path = os.readlink(f"/proc/self/fd/{file}")
        if not os.path.isdir(path):
            done.append(path)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", lambda self, name: (done.append(str(self)), replace(self, name)))
    write_dataset(tmp_path / "set", [[[1, 2, 0]]], validation=[[5, 0]])
    synced, named = done[::2], done[1::2]
    assert synced == named
    names = [Path(name).name.strip(".").removesuffix(".tmp") for name in named]
    assert names[:2] == ["tokenizer_config.json", "tokenizer.json"]
    assert names[2:] == ["train-00000.arrow", "validation-00000.arrow", "blocks.arrow", "manifest.json"]


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl, line at byte 14: must be JSON"),
        ("a.jsonl", b'[{"text": "x"}]', r"a\.jsonl, line at byte 0: must be a JSON object, or a \.json file"),
        ("a.json", b'[{"text": "x"}, ', r"a\.json: cannot be read: JSONDecodeError: .* column 17"),
        ("a.jsonl", b'{"body": "x"}\n', r"line at byte 0: no text under 'text'; it has body; choose with --keys"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "cut \\ud83d"}\n', r"jsonl, line at byte 14: .* '\\ud83d' .*surrogates"),
        ("a.json", b'[{"text": "x"}, 3]', r"a\.json, record 1: must be a JSON object, .*: 3"),
        ("a.jsonl", b"\n", "holds nothing that can be used"),
        ("a.parquet", b"PAR1", r"a\.parquet: cannot be read: .*Parquet file size is 4 bytes"),
        ("a.txt", b"abc\xff", r"a\.txt: .*utf-8.* byte 0xff in position 3"),
        ("a.jsonl.gz", b"not gzip", r"a\.jsonl\.gz"),
    ],
)
def test_bad_input_is_named(tmp_path, name, content, message, capsys):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit):
        main([f"--source={tmp_path / name}", f"--output={tmp_path / 'out'}"])
    assert re.search(f"^error: .*{message}", capsys.readouterr().err, re.MULTILINE)
    assert not (tmp_path / "out").exists()


def test_bad_records_are_left_out_counted_and_listed(texts, make, tokenizer_folder, tmp_path, monkeypatch, capsys):
    """Also where a kill came before the manifest; each with its place, which is counted here."""
    monkeypatch.setattr(sources, "UNIT_BYTES", 3000)
    bad = [b'{"text": "cut \xe2\x82"}', b'{"text": null}', b'{"text": "\\ud83d"}', b"no JSON", b'["text"]']
    source = tmp_path / "in.jsonl"
    content = b""
    expected = []
    for i, text in enumerate(texts):
        if i % 80 == 7:
            expected.append(f"{source}, line at byte {len(content)}")
            content += bad[i // 80] + b"\n"
        content += json.dumps({"text": text}).encode() + b"\n"
    source.write_bytes(content)
    command = [f"--source={source}", f"--tokenizer={tokenizer_folder}", f"--output={tmp_path / 'out'}", "--dry-run"]
    for allowed, code in ((4, 1), (5, 0)):
        with pytest.raises(SystemExit) as ended:
            main([*command, f"--skip-bad={allowed}"])
        *said, last = capsys.readouterr().out.splitlines()
        assert [line.split(": ")[0] for line in said] == expected
        assert (last, ended.value.code) == ("documents 400, bad records 5", code)
    assert not (tmp_path / "out").exists()
    with pytest.raises(DataError, match="5 bad records are more than --skip-bad 4"):
        make(source, skip_bad=4)
    with cut_off(), STOP:
        make(source, skip_bad=5)
    folder = make(source, skip_bad=5)
    assert (folder / "bad_records.txt").read_text().splitlines() == said
    assert json.loads((folder / "manifest.json").read_bytes())["bad_records"] == 5
    assert documents_of(folder) == Counter(texts)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--shard-mb=0", "--shard-mb 0.0: must be from"),
        ("--block-mb=inf", "--block-mb inf: must be from"),
        ("--validation-fraction=nan", "--validation-fraction nan: must be from 0 to 1"),
        ("--tokenizer=nothing", "nothing"),
        ("--source=nothing.txt", "--source nothing.txt: no files there"),
        ("--output=hdfs://name/out", "--output hdfs://name/out: must be"),
        ("--output=a.txt/out", "a.txt/out"),
        ("--vocab-size=256", "--vocab-size 256: must be at least 257"),
        ("--vocab-size=300 --tokenizer=T", "--vocab-size 300: is to train"),
        ("--eos-token=</s>", "--eos-token </s>: needs --tokenizer"),
        ("--skip-bad=-1", "--skip-bad -1: must be at least 0"),
        ("--keys=a,b", "--keys a,b: must be as many"),
        ("--source=a.txt --keys=body", "--keys body: no effect"),
        ("--separator=x", "--separator 'x': no effect"),
        ("--seq-len=8", "--seq-len 8: no effect with --format text"),
        ("--train-eos", "--train-eos True: no effect with --format text"),
        ("--dtype=uint16", "--dtype uint16: no effect with --format text"),
        ("--format=sft", "--format sft: needs the --tokenizer"),
        ("--format=tokens", "--format tokens: needs the --tokenizer"),
        ("--seq-len=1 --format=chat --tokenizer=T", "--seq-len 1: must be at least 2"),
    ],
)
def test_options_that_make_no_sense_are_refused(lines, tokenizer_folder, tmp_path, monkeypatch, flags, message, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    files = set(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        main(["--source=in.jsonl", "--output=out", *flags.replace("=T", f"={tokenizer_folder}").split()])
    assert f"\nerror: {message}" in f"\n{capsys.readouterr().err}"
    assert set(tmp_path.iterdir()) == files


def test_a_mistyped_option_leaves_the_dataset_that_it_was_to_replace(lines, make, tmp_path):
    before = contents(make(lines))
    with pytest.raises(TitaniteError, match="under 'body'"):
        make(lines, keys="body", overwrite=True)
    assert contents(tmp_path / "out") == before


def test_a_separator_that_does_not_occur_is_told(make, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sources, "UNIT_BYTES", 100)  # the separator of most.txt is in one unit of many
    words = "word " * 100
    contents = {"never.txt": words, "most.txt": f"{words}\n---\n{words}", "end.txt": "one\n---\n", "empty.txt": ""}
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    options = {"overwrite": True, "separator": "\\n---\\n"}
    assert documents_of(make(tmp_path / "*.txt", **options)) == Counter([words, words, words, "one"])
    undivided = f"does not occur in 1 of 4 texts, such as {tmp_path}/never.txt; each of these is one document"
    assert caplog.messages == [f"--separator '\\n---\\n': {undivided}"]
    caplog.clear()
    (tmp_path / "never.txt").unlink()
    make(tmp_path / "*.txt", **options)
    assert not caplog.messages


@pytest.mark.parametrize("vocab_size", [300, 258])
def test_a_vocabulary_that_a_text_is_too_small_for_is_told(tmp_path, caplog, vocab_size):
    (tmp_path / "a.txt").write_text("abab")
    prepare([str(tmp_path / "a.txt")], str(tmp_path / "out"), vocab_size=vocab_size, validation_fraction=0)
    told = ["--vocab-size 300: the text has no more than 259 tokens to learn"]
    assert caplog.messages == told * (vocab_size == 300)


def test_compressed_text_makes_as_many_files_as_it_holds_text_for(make, tmp_path):
    """About: what is compressed counts as five times as long."""
    lines = write_jsonl(tmp_path / "a.jsonl", [f"{i} {'word ' * 40}" for i in range(500)]).read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    megabytes = len(gzip.compress(lines)) / 4 * 2 / 2**20  # two bytes for a token, which is about four of text
    folder = make(tmp_path / "a.jsonl.gz", shard_mb=megabytes, validation_fraction=0)
    assert len(list(folder.glob("train-*"))) == 5


@pytest.mark.parametrize(
    ("fraction", "said"),
    [("0", "nothing is held out: raise"), ("1", "everything is held out: lower"), ("0.5", "")],
)
def test_a_split_without_documents_is_told(lines, tokenizer_folder, tmp_path, capsys, fraction, said):
    words = [f"--output={tmp_path / 'out'}", f"--tokenizer={tokenizer_folder}", f"--validation-fraction={fraction}"]
    main([f"--source={lines}", *words])
    found = re.findall(r"^.*held out: \w+", capsys.readouterr().out, re.MULTILINE)
    assert found == [said] * bool(said)


# ---------------------------------------------------------------- kinds of files


@pytest.mark.parametrize(("name", "units"), [("array.json.gz", 1), ("array.json", 1), ("lines.json", 2)])
def test_a_json_file_holds_an_array_or_lines(texts, tmp_path, monkeypatch, name, units):
    """Only lines are divided among processes."""
    records = [{"text": text, "more": [{}]} for text in texts]
    text = "\ufeff \n" + json.dumps(records, indent=2, ensure_ascii=False)
    if name == "lines.json":
        text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / name).write_bytes(compressed(name, text.encode()))
    monkeypatch.setattr(sources, "UNIT_BYTES", len(text) // 2 + 1)
    assert len(sources.plan_units(sources.list_files([str(tmp_path / name)]))) == units
    assert documents_in(tmp_path / name) == texts


@pytest.mark.parametrize(("name", "dialect"), [("a.csv.gz", "excel"), ("a.tsv", "excel-tab")])
def test_csv_gives_the_records_that_pythons_csv_module_wrote(texts, tmp_path, name, dialect):
    """Also with line ends and quotes in a text, and with texts longer than that module reads by default."""
    long = [*texts, "x" * 200_000, 'a "quoted" word,\r\nand a\ttab']
    table = io.StringIO(newline="")
    csv.writer(table, dialect).writerows([["number", "body"], *enumerate(long)])
    (tmp_path / name).write_bytes(compressed(name, table.getvalue().encode("utf-8-sig")))
    assert documents_in(tmp_path / name, ["body"]) == long


def test_bad_rows_of_csv_are_named(make, tmp_path):
    (tmp_path / "bad.csv").write_bytes(b"body,n\none,1\ntwo,2,3\n\xff,4\n,5\nfive\n")
    folder = make(tmp_path / "bad.csv", skip_bad=2, keys="body", validation_fraction=0)
    assert documents_of(folder) == Counter(["one", "five"])
    surplus, not_utf8 = (folder / writer.BAD_RECORDS).read_text().splitlines()
    assert surplus == f"{tmp_path}/bad.csv, row 1: has 1 cells more than the first line names"
    assert re.match(r".*bad\.csv, row 2: .*surrogates not allowed", not_utf8)
    (tmp_path / "open.csv").write_text('body\n"never closed\n')
    with pytest.raises(DataError, match=r"open\.csv: cannot be read: ValueError: line 2: unexpected end of data"):
        documents_in(tmp_path / "open.csv", ["body"])


def test_a_damaged_page_of_parquet_is_named_where_it_has_a_checksum(tmp_path):
    file, column = tmp_path / "a.parquet", {"text": ["abcdefgh" * 1000] * 9}
    options = {"use_dictionary": False, "write_statistics": False, "write_page_checksum": True}
    pq.write_table(pa.table(column), file, compression="zstd", **options)
    damaged = bytearray(file.read_bytes())
    damaged[pq.ParquetFile(file).metadata.row_group(0).column(0).total_compressed_size // 2] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read: .*checksum verification failed"):
        documents_in(file)


# ---------------------------------------------------------------- which files


def test_a_folder_is_read_with_all_below_it_and_what_is_left_out_is_said(tmp_path, caplog):
    read = ["a.TXT", "b.ndjson", "c.json.gz", "d.md.zst", "e.jsonl", "more/deep/f.Parquet"]
    (tmp_path / "more" / "deep").mkdir(parents=True)
    for name in (*read, "package.json", "a.png", "labels.csv", "train-00000.arrow"):
        (tmp_path / name).write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe.txt")  # to read it would take for ever
    assert [file.url.removeprefix(f"{tmp_path}/") for file in sources.list_files([str(tmp_path)])] == read
    assert f"{tmp_path}: 4 files of other kinds left out, such as {tmp_path}/a.png" in caplog.text
    caplog.clear()
    given = sources.list_files([str(tmp_path / "*.json"), str(tmp_path / "mor*")])  # a glob, also of a folder
    assert [Path(file.url).name for file in given] == ["f.Parquet", "package.json"]
    assert not caplog.text


def test_a_file_is_read_once_whatever_its_names_and_that_is_told(tmp_path, monkeypatch, caplog):
    """Links are followed, to folders, too, as in the Hugging Face cache, where every file of a snapshot is a link."""
    for folder in ("blobs", "snapshot", "all"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "snapshot")
    Path("../blobs/0123").write_text("hello")
    Path("a.txt").symlink_to("../blobs/0123")
    Path("b.txt").write_text("b")
    Path("../link").symlink_to("snapshot")
    Path("../all/more").symlink_to("../snapshot")
    names = ["./", "../link", "../l*/../snapshot/*.txt", "../all", f"file://{tmp_path}/link"]
    for source in (["a.txt", *names], ["../all"], ["./*"]):
        found = sources.list_files(source)
        assert [(Path(file.url).name, file.size) for file in found] == [("a.txt", 5), ("b.txt", 1)]
    told = "files are in the list already, by this or another name; each is read once"
    repeated = ["1 of 2", *["2 of 2"] * 4]
    assert caplog.messages == [f"--source {name}: {n} {told}" for name, n in zip(names, repeated, strict=True)]
    Path("c.txt").symlink_to("../nowhere")
    with pytest.raises(DataError, match=r"cannot be listed: .*No such file or directory: .*c\.txt"):
        sources.list_files(["."])


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("", "a.txt sub/b.md sub/deep/c.txt"),
        ("/sub", "a.txt sub/b.md sub/deep/c.txt"),  # up is the folder above
        ("/**", "a.txt sub/b.md sub/deep/c.txt sub/d.png"),
        ("/**/deep/**/*", "sub/deep/c.txt"),
        ("/sub/up/sub/again/**/*.md", "sub/b.md"),
    ],
)
def test_links_that_lead_back_end(tmp_path, monkeypatch, source, names):
    """Each real folder once, though there are as many paths through two such links as steps to the power of two."""
    (tmp_path / "loop" / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "loop" / ".hidden").mkdir()
    for name in ("a.txt", "sub/b.md", "sub/deep/c.txt", "sub/d.png", ".hidden/e.png"):
        (tmp_path / "loop" / name).write_text("text")
    (tmp_path / "loop" / "sub" / "up").symlink_to("..")
    (tmp_path / "loop" / "sub" / "again").symlink_to("../sub")
    walked = []
    monkeypatch.setattr("os.walk", lambda *top, walk=os.walk, **how: count(walked, walk(*top, **how)))
    found = sources.list_files([f"{tmp_path}/loop{source}"])
    real = [os.path.relpath(os.path.realpath(file.url), tmp_path / "loop") for file in found]
    assert sorted(real) == sorted(names.split())


def count(steps: list[Any], walk: Iterator[Any]) -> Iterator[Any]:
    """Fails where a walk does not end."""
    for step in walk:
        steps.append(step)
        assert len(steps) < 100
        yield step


class Store(fsspec.AbstractFileSystem):
    """A remote file system with one file, and blocks as large as those of s3fs."""

    protocol, cachable = "store", False
    content = (json.dumps({"text": "x" * 1000}) + "\n").encode() * 30_000
    fetched, answers = 0, True

    def info(self, path: str, **_: object) -> dict[str, object]:
        return {"name": path, "size": len(self.content), "type": "file"}

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **_: object) -> "StoreFile":
        return StoreFile(self, path, block_size=block_size or 50 * 2**20)


class StoreFile(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        Store.fetched += end - start
        return Store.content[start:end] if Store.answers else b""


def test_lines_of_a_remote_file_are_read_but_not_far_beyond_the_unit_and_an_empty_answer_is_no_end(monkeypatch):
    fsspec.register_implementation("store", Store, clobber=True)
    monkeypatch.setattr(Store, "fetched", 0)
    monkeypatch.setattr(sources, "UNIT_BYTES", 2**20)
    unit = sources.plan_units(sources.list_files(["store://lines.jsonl"]))[3]
    assert 1000 < sum(1 for _ in sources.documents(unit, ["text"])) < 1050
    assert Store.fetched < 8 * 2**20 < len(Store.content) / 3
    monkeypatch.setattr(Store, "answers", False)
    (table,) = sources.plan_units(sources.list_files(["store://table.csv"]))
    (ids,) = sources.plan_units(sources.list_files(["store://ids.bin"]))
    tokens = token_files.token_documents(ids, token_files.Reading(0, 400, "uint16", "", False))
    for silent in (sources.documents(unit, ["text"]), sources.documents(table, ["text"]), tokens):
        with pytest.raises(DataError, match=r"store://.*: cannot be read: the server has sent"):
            list(silent)


def test_a_folder_that_may_not_be_read_is_not_taken_for_an_empty_one(tmp_path):
    """Its text would be missing from the dataset."""
    refused = PermissionError(errno.EACCES, "Permission denied", "in/folder")
    with patch("os.scandir", side_effect=refused), pytest.raises(DataError, match=r"cannot be listed: .*denied: 'in/f"):
        sources.list_files([str(tmp_path)])


# ---------------------------------------------------------------- tokenizers


def with_template(texts, eos: AddedToken, template: str) -> RawTokenizer:
    """A byte-level BPE with <|begin_of_text|>, <|endoftext|>, `eos` and a template."""
    raw = train_tokenizer(texts, 300).raw
    raw.add_tokens([AddedToken("<|begin_of_text|>", special=True), eos])
    names = [name for name in template.split() if name != "$A"]
    raw.post_processor = TemplateProcessing(template, special_tokens=[(name, raw.token_to_id(name)) for name in names])
    return raw


END = AddedToken("<|end_of_text|>", special=True)


@pytest.mark.parametrize(
    ("template", "bos"),
    [
        ("<|begin_of_text|> $A", "<|begin_of_text|>"),
        ("<|begin_of_text|> $A <|end_of_text|>", "<|begin_of_text|>"),  # adds an eos itself
        ("<|end_of_text|> $A", None),  # OPT's and GPT-2's bos is their eos
        ("<|end_of_text|> <|endoftext|> $A <|end_of_text|>", "<|endoftext|>"),
    ],
)
def test_documents_have_the_bos_of_the_template_and_one_eos(texts, template, bos):
    """Also where the text spells special tokens out, or is longer than its tokenizer was told to cut and pad it to."""
    raw = with_template(texts, END, template)
    raw.enable_truncation(4)
    raw.enable_padding(length=9)
    tokenizer = Tokenizer(raw, END.content)
    assert [raw.id_to_token(token) for token in tokenizer.prefix] == [bos][: bos is not None]
    for text in ["a", "<|begin_of_text|>spelt out<|end_of_text|>", "", texts[0] * 3]:
        document = tokenizer.encode_documents([text])[0].tolist()
        assert document.index(tokenizer.eos_id) == len(document) - 1
        assert document.count(raw.token_to_id("<|begin_of_text|>")) == (bos == "<|begin_of_text|>")
        assert tokenizer.decode(document) == text
        assert tokenizer.encode(text) == document[:-1]


def test_which_token_ends_a_document_and_which_template_a_tokenizer_has(texts, tmp_path):
    """A template in a file of its own goes first, as in transformers."""
    with_template(texts, END, "$A").save(str(tmp_path / "tokenizer.json"))
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    for declared, eos, template in (
        ({}, "<|end_of_text|>", ""),
        ({"eos_token": {"content": "<|endoftext|>"}, "chat_template": "one"}, "<|endoftext|>", "one"),
        ({"eos_token": None, "chat_template": several}, "<|end_of_text|>", "plain"),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared))
        tokenizer = load_tokenizer(tmp_path)
        assert (tokenizer.eos_token, tokenizer.chat_template) == (eos, template)
    (tmp_path / "chat_template.jinja").write_text("file")
    tokenizer = load_tokenizer(tmp_path, "<|begin_of_text|>")
    assert (tokenizer.eos_token, tokenizer.chat_template) == ("<|begin_of_text|>", "file")
    with pytest.raises(TitaniteError, match=r"has no token '<pad>'; .*<\|end_of_text\|>"):
        load_tokenizer(tmp_path, "<pad>")


@pytest.mark.parametrize("kind", ["not special", "Unigram", "between spaces"])
def test_a_token_that_a_text_can_spell_out_does_not_end_documents(texts, kind):
    if kind == "not special":
        raw = with_template(texts, AddedToken("</s>", special=False), "$A")
    elif kind == "Unigram":
        pieces = [("<unk>", 0.0), ("</s>", 0.0), *((letter, -5.0) for letter in "▁a</s>")]
        raw = RawTokenizer(models.Unigram(pieces, unk_id=0))
    else:
        raw = RawTokenizer(models.WordLevel({"</s>": 0, "a": 1}, unk_token="a"))
        raw.normalizer, raw.pre_tokenizer = normalizers.Prepend("_"), pre_tokenizers.Split(" ", "isolated")
    if kind != "not special":
        raw.add_special_tokens([AddedToken("</s>", special=True)])
    with pytest.raises(TitaniteError, match=r"^mine: a text that spells out '</s>' would become that token"):
        Tokenizer(raw, "</s>", "mine")


def test_a_tokenizer_is_learnt_from_pieces_of_a_very_long_word():
    """The time to learn from a word grows with the square of its length: 40,000 letters took a second."""
    text = "x" * 2**14
    learnt = train_tokenizer([text], 300)
    assert max(map(len, learnt.raw.get_vocab())) == 2000
    assert learnt.decode(learnt.encode(text)) == text


# ---------------------------------------------------------------- other projects' tokens


@pytest.fixture
def take(make) -> Make:
    """Prepares files of tokens, all for training."""
    return lambda *given, **options: make(*given, **{"format": "tokens", "validation_fraction": 0} | options)


def tokens_of(folder: Path, split: str = "train") -> Counter[tuple[int, ...]]:
    return Counter(map(tuple, chain.from_iterable(stored_blocks(folder, split))))


def test_tokens_become_documents_with_one_eos_each(texts, tokenizer_folder, take, tmp_path, monkeypatch):
    """The last one may lack it. Some are held out, and a file of nothing but eos gives none."""
    tokenizer = load_tokenizer(tokenizer_folder)
    documents = [tokenizer.encode(text) for text in texts]
    eos = tokenizer.eos_id
    ids = [eos, 5, 6, eos, 7, eos, eos, 8, eos, *chain.from_iterable([*document, eos] for document in documents)]
    np.array(ids[:-1], "<u2").tofile(tmp_path / "a.bin")
    np.array([eos] * 9, "<u2").tofile(tmp_path / "b.bin")
    monkeypatch.setattr(token_files, "PIECE_BYTES", 14)
    folder = take(tmp_path / "*.bin", dtype="uint16", validation_fraction=0.1, shard_mb=0.01)
    train, held_out = tokens_of(folder), tokens_of(folder, "validation")
    assert train + held_out == Counter((*d, eos) for d in [[5, 6], [7], [8], *documents])
    assert 15 < held_out.total() < 75
    assert len(list(folder.glob("train-*"))) == round(0.9 * 2 * len(ids) / 2**20 / 0.01)
    verify.main([str(folder)])


def llm_c_header(magic: int, dtype: str, ids: list[int]) -> bytes:
    return np.array([magic, 1, len(ids), *[0] * 253], "<i4").tobytes() + np.array(ids, dtype).tobytes()


@pytest.mark.parametrize("layout", ["uint32", "uint64", "GPT-2 header", "Llama 3 header", "npy"])
def test_ids_are_read_as_they_were_written(layout, take, tmp_path):
    rng = random.Random(0)
    documents = [(*(rng.randrange(1, 399) for _ in range(rng.randint(2, 20))), 0) for _ in range(50)]
    ids = list(chain.from_iterable(documents))
    file = tmp_path / "a.bin"
    headers = {"GPT-2 header": (20240520, "<u2"), "Llama 3 header": (20240801, "<u4")}
    if layout == "npy":
        with file.open("wb") as stream:
            np.save(stream, np.array(ids, "<i4"))
    elif layout in headers:
        file.write_bytes(llm_c_header(*headers[layout], ids))
    else:
        np.array(ids, layout.removeprefix("u")).tofile(file)  # signed, which has the same bits
    assert tokens_of(take(file, dtype=layout if "uint" in layout else None)) == Counter(documents)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"\0\0", {}, "the input holds nothing that can be used"),
        (b"\1\0\x90\1", {}, r"a\.bin: token 1: id 400 is not in the tokenizer's vocabulary of 400"),
        (b"\1\1\2\1" * 9, {}, r"a\.bin: none of its 18 ids ends a document, as 0 would"),
        (b"\1\0\0\0", {"dtype": None}, r"a\.bin: name the --dtype of its ids, one of uint8, uint16"),
        (llm_c_header(20240520, "<u4", [7, 8, 0]), {}, r"a\.bin: its header says 3 ids of uint16, it holds 6"),
        (llm_c_header(20240801, "<u4", [7, 8, 0]), {}, r"a\.bin: --dtype uint16: its header says uint32"),
        (b"PAR1", {}, r"a\.bin: --dtype uint16 is for files of bare ids"),
        (b"odd", {}, r"a\.bin: cannot be read: .*multiple"),
        (b"\1\0\0\0", {"packed": True}, r"a\.bin: --keys and --packed are for Arrow and Parquet"),
        (b"\1\0\0\0", {"name": "a.bin.gz"}, r"a\.bin\.gz: tokens are read from files that are not compressed"),
    ],
)
def test_tokens_that_cannot_be_used_are_named(take, tmp_path, content, options, message):
    file = tmp_path / options.pop("name", "a.bin")
    file.write_bytes(content)
    with pytest.raises(DataError, match=message):
        take(file, **{"dtype": "uint16"} | options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize(
    "list_of",
    [pa.list_(pa.int8()), pa.large_list(pa.uint64()), pa.list_(pa.int32(), 3)],
    ids=["list", "large", "fixed"],
)
def test_tokens_in_tables_are_documents_by_the_row(kind, list_of, take, tmp_path):
    rows = [[5, 6, 0], [7, 8, 9], [3, 0, 4], [1, 0, 2], [0, 0, 0]]  # 0 is eos
    rows += [None] * (kind != "Parquet")  # it has no fixed lists with null
    file = write_table(tmp_path, kind, n=range(len(rows)), input_ids=pa.array(rows, list_of))
    each = Counter([(5, 6, 0), (7, 8, 9, 0), (3, 0), (4, 0), (1, 0), (2, 0)])
    assert tokens_of(take(file)) == each
    packed = Counter([(5, 6, 0), (7, 8, 9, 3, 0), (4, 1, 0), (2, 0)])
    assert tokens_of(take(file, packed=True, overwrite=True)) == packed


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"n": [1], "text": ["a"]}, {}, r"one column of lists of integers; it has n \(int64\), text \(string\)"),
        ({"ids": [[1]], "mask": [[1]]}, {}, r"--keys \['ids', 'mask'\]: must be one column .*; it has ids \(list"),
        ({"ids": [[1]]}, {"keys": "id"}, r"--keys id: must be one column of lists of integers; it has ids \(list"),
        ({"ids": [[1, None]]}, {}, "column 'ids' holds null in place of an id"),
        ({"ids": [[1], [2, -1]]}, {}, r"token 2: id -1 is not in the tokenizer's vocabulary of 400, read as int64"),
        ({"ids": [[1]] * 8 + [[2, 400]]}, {}, "token 9: id 400 is not in the tokenizer's vocabulary of 400"),
        ({"ids": [[1, 2]]}, {"packed": True}, "none of its 2 ids ends a document"),
    ],
)
def test_tables_without_tokens_say_what_they_hold(columns, options, message, take, tmp_path):
    source = write_table(tmp_path, "Parquet", **columns)
    with pytest.raises(DataError, match=f"{source}: .*{message}"):
        take(source, **options)
    assert not (tmp_path / "out").exists()

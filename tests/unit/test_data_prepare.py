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
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
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
from data import sources, writer
from data.prepare import main
from data.shards import SPLITS, DataError
from data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from tests.corpus import documents_in, prepare, stored_blocks, word_tokenizer, write_dataset
from tools import convert as convert_module
from tools import verify
from tools.convert import convert

ROOT = Path(__file__).parents[2]
SEPARATOR = "\n=====\n"
WORDS = ["the", "quick", "naïve", "日本語", "def f(x):\n    return x\n", "🙂", "<|endoftext|>", "  ", "\r\n"]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 60))) + f" {i}" for i in range(400)]


@pytest.fixture(scope="module")
def tokenizer_folder(texts, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(texts, 400).save(folder)
    return folder


def write_jsonl(path: Path, texts, key="text") -> Path:
    path.write_text("".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts)))
    return path


def decoded(folder: Path, split: str) -> list[str]:
    """The documents of a split, each checked to end with its only eos."""
    tokenizer = load_tokenizer(folder)
    found = []
    for block in stored_blocks(folder, split):
        for document in block:
            assert document.count(tokenizer.eos_id) == 1
            assert document[-1] == tokenizer.eos_id
            found.append(tokenizer.decode(document))
    return found


def documents_of(folder: Path) -> Counter[str]:
    return Counter(decoded(folder, "train") + decoded(folder, "validation"))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture
def alone(tokenizer_folder) -> dict[str, Any]:
    """Options of a preparation in this process."""
    return {"tokenizer": str(tokenizer_folder), "processes": 1}


def start_script(path: Path, code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start data.prepare with small units and these arguments, after `code`, in a process of its own."""
    begin = (
        "import os, signal; from pathlib import Path; from data import prepare, sources; sources.UNIT_BYTES = 20_000\n"
    )
    end = f"if __name__ == '__main__':\n    prepare.main({[str(argument) for argument in arguments]!r})\n"
    path.write_text(begin + code + end)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, str(path)], env=environment, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def inputs(texts, tmp_path) -> dict[str, str]:
    """The same documents in every kind of source."""
    folder = tmp_path / "in"
    (folder / "files").mkdir(parents=True)
    for i, text in enumerate(texts):
        (folder / "files" / f"{i:04}.md").write_bytes(text.encode())
    lines = write_jsonl(folder / "a.jsonl", texts).read_bytes()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "a.jsonl.zst").write_bytes(pa.compress(lines, codec="zstd", asbytes=True))
    pq.write_table(pa.table({"n": range(len(texts)), "text": texts}), folder / "a.parquet", row_group_size=64)
    (folder / "one.txt").write_bytes(SEPARATOR.join(texts).encode())
    os.mkfifo(folder / "pipe")
    for name, half in (("b1.jsonl", texts[:200]), ("b2.jsonl", texts[200:])):
        fsspec.filesystem("memory").pipe_file(f"{folder}/{name}", write_jsonl(folder / name, half).read_bytes())
    return {
        "folder": str(folder / "files"),
        "URL": f"memory:/{folder}",
        "URL glob": f"memory:/{folder}/b?.jsonl",
        "pipe": str(folder / "pipe"),
        "Python": "",
        "separator": str(folder / "one.txt"),
        **{kind: str(folder / f"a.{kind}") for kind in ("jsonl", "jsonl.gz", "jsonl.zst", "parquet")},
    }


@pytest.mark.parametrize(
    "kind",
    [
        *("folder", "jsonl.gz", "jsonl.zst", "parquet", "URL", "URL glob", "separator", "pipe"),
        *("pipe with separator", "Python"),
    ],
)
def test_every_source_gives_each_document_once(inputs, texts, alone, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(sources, "UNIT_BYTES", 3000)  # many units, cut in the middle of lines
    output, options = tmp_path / "out", alone | {"validation_fraction": 0.1}
    if "separator" in kind:
        options["separator"] = SEPARATOR.replace("\n", "\\n")
    if "pipe" in kind:
        content = Path(inputs["separator" if "separator" in kind else "jsonl"])
        threading.Thread(target=lambda: (tmp_path / "in" / "pipe").write_bytes(content.read_bytes())).start()
    if kind == "Python":
        prepare_module.prepare((text for text in texts), str(output), **options)
    else:
        prepare([inputs[kind.removesuffix(" with separator")]], str(output), **options)
    assert documents_of(output) == Counter(texts)
    assert 15 < len(decoded(output, "validation")) < 75
    numbers = [int(text.rpartition(" ")[2]) for text in decoded(output, "train")]  # in the order of the input
    for later in (range(len(numbers)), [*numbers[1:], numbers[0]]):  # shuffled, and not file by file
        assert abs(np.corrcoef(numbers, later)[0, 1]) < 4 / len(numbers) ** 0.5
    assert not list(output.glob(".parts"))
    verify.main([str(output)])


def test_the_held_out_documents_depend_on_their_text_alone(texts, alone, tmp_path):
    """Whatever the order, how often a text comes, and into how many pieces it is cut."""
    held_out = {}
    for name, order, longest in (("a", texts, 0), ("b", texts[::-1] + texts[:50], 0), ("cut", texts, 40)):
        file, options = write_jsonl(tmp_path / f"{name}.jsonl", order), alone | {"max_characters": longest}
        prepare([str(file)], str(tmp_path / name), validation_fraction=0.2, **options)
        held_out[name] = Counter(decoded(tmp_path / name, "validation"))
        assert longest or not {*held_out[name]} & {*decoded(tmp_path / name, "train")}
    assert {*held_out["a"]} == {*held_out["b"]}
    cut = Counter(piece for text in held_out["a"] for piece in prepare_module._pieces(text, 40))
    assert len(cut) > len(held_out["a"]) > 40
    assert held_out["cut"] == cut


def test_long_texts_are_cut_at_line_ends_and_nothing_is_lost() -> None:
    text = "".join(f"line {i} {'x' * (i % 37)}\n" for i in range(500)) + "y" * 3000
    cut = list(prepare_module._pieces(text, 1000))
    assert "".join(cut) == text
    assert all(len(piece) <= 1000 for piece in cut)
    assert all(piece.endswith("\n") for piece in cut if "line" in piece and piece is not cut[-1])
    assert sum(len(piece) < 900 for piece in cut) <= 2
    assert list(prepare_module._pieces(text, 0)) == [text]


def test_the_same_bytes_by_any_number_of_processes_and_parts(texts, alone, tmp_path, monkeypatch):
    file = write_jsonl(tmp_path / "in.jsonl", texts * 3)
    monkeypatch.setattr(sources, "UNIT_BYTES", 100_000)
    made, sizes = [], {"shard_mb": 0.01, "block_mb": 0.004, "validation_fraction": 0.1}
    for processes, held_bytes in ((1, 2**20), (3, 2**20), (1, 1)):  # the last: each unit in several parts
        monkeypatch.setattr(prepare_module, "HELD_BYTES", held_bytes)
        monkeypatch.setattr(prepare_module, "BATCH_BYTES", 500 if held_bytes == 1 else 2**20)
        output = tmp_path / f"out{len(made)}"
        prepare([str(file)], str(output), **alone | {"processes": processes}, **sizes)
        made.append(contents(output))
    assert made[0] == made[1] == made[2]
    assert sum(name.startswith("train-") for name in made[0]) > 1


@pytest.mark.parametrize("name", ["a.txt", "a.html.zst", "a.jsonl.gz"])
def test_a_byte_order_mark_is_no_text_and_zeros_after_gzip_are_no_content(name, tmp_path):
    plain = content = b"\xef\xbb\xbf" + (b'{"text": "def f():"}' if "jsonl" in name else b"def f():")
    if name.endswith("gz"):
        content = gzip.compress(content[:5]) + gzip.compress(content[5:]) + bytes(1000)
        assert subprocess.run(["gzip", "-dc"], input=content, capture_output=True, check=True).stdout == plain
    elif name.endswith("zst"):
        content = pa.compress(content, codec="zstd", asbytes=True)
    (tmp_path / name).write_bytes(content)
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
    known = sources._records

    def records(file, kind, raw, unit, keys):
        if kind != "numbers":
            return known(file, kind, raw, unit, keys)
        return ((i, {"text": line.decode()}) for i, line in enumerate(raw.read().split()))

    monkeypatch.setattr(sources, "_records", records)
    for name in ("a.numbers", "b.txt"):
        (tmp_path / name).write_text(" ".join(map(str, range(1000))))
    assert read_in_units(tmp_path / "a.numbers", unit_bytes=100) == [str(i) for i in range(1000)]
    assert read_in_units(tmp_path / "b.txt", " ", unit_bytes=100) == [str(i) for i in range(1000)]
    with pytest.raises(DataError, match=r"a\.numbers, row 0: no text under 'body'; it has text"):
        prepare([f"{tmp_path / 'a.numbers'}"], str(tmp_path / "out"), keys="body")


def test_a_tokenizer_is_learnt_from_pieces_of_a_very_long_word():
    """The time to learn from a word grows with the square of its length: 40,000 letters took a second."""
    text = "x" * 2**14
    learnt = train_tokenizer([text], 300)
    assert max(map(len, learnt.raw.get_vocab())) == 2000
    assert learnt.decode(learnt.encode(text)) == text


def test_parts_of_a_file_that_was_changed_at_the_same_size_are_not_used(texts, alone, tmp_path, monkeypatch):
    """Lines in another order, say: some would come twice and others never."""
    monkeypatch.setattr(sources, "UNIT_BYTES", 2_000)
    file = write_jsonl(tmp_path / "in.jsonl", texts)
    with patch("data.prepare._write_bucket", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        prepare([str(file)], str(tmp_path / "out"), **alone)
    before = file.stat()
    write_jsonl(file, texts[::-1])
    os.utime(file, ns=(0, before.st_mtime_ns + 10**9))
    assert file.stat().st_size == before.st_size
    for name in ("out", "whole"):
        prepare([str(file)], str(tmp_path / name), **alone)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("progress", ["unit-", "bucket-"])
def test_after_sigkill_the_same_command_finishes_with_the_same_bytes(
    texts, tokenizer_folder, tmp_path, monkeypatch, progress
):
    file = write_jsonl(tmp_path / "in.jsonl", texts)
    options = ["--source", str(file), "--tokenizer", str(tokenizer_folder), "--shard-mb=0.02", "--processes=1"]
    monkeypatch.setattr(sources, "UNIT_BYTES", 20_000)
    main([*options, "--output", str(tmp_path / "whole")])
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
    killed = start_script(tmp_path / "killed.py", code, *options, "--output", output)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert not (output / "manifest.json").exists()
    done = {path.name for path in output.glob(f".parts/{progress}*")}
    assert len(done) == 3
    watched, real = [], Path.replace
    monkeypatch.setattr(Path, "replace", lambda path, target: (watched.append(target.name), real(path, target)))
    main([*options, "--output", str(output)])
    assert not done & {*watched}, "finished parts are not made again"
    assert contents(output) == contents(tmp_path / "whole")


def test_the_workers_of_a_killed_run_end_with_it(texts, alone, tmp_path):
    """They were stopped before they wrote. If they went on, they would write beside a new start."""
    (tmp_path / "pids").mkdir()
    code = (
        "def stop():\n"
        f"    open({str(tmp_path / 'pids')!r} + f'/{{os.getpid()}}', 'w').close()\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "prepare._write_sorted = lambda *part: stop()\n"
    )
    words = f"--source={write_jsonl(tmp_path / 'in.jsonl', texts)}", f"--output={tmp_path / 'out'}", "--processes=2"
    parent = start_script(tmp_path / "killed.py", code, *words, f"--tokenizer={alone['tokenizer']}")
    while len(pids := [int(file.name) for file in (tmp_path / "pids").iterdir()]) < 2:
        assert parent.poll() is None
    while not all(state(pid) == "T" for pid in pids):
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
    prepare([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), **alone)
    assert documents_of(tmp_path / "out") == Counter(texts)


def state(pid: int) -> str:
    """Of a process, by proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


@pytest.mark.parametrize("cut", ["at the end", "at another start"])
def test_a_kill_while_parts_are_removed_loses_no_document(texts, alone, tmp_path, monkeypatch, cut):
    source, output = [str(write_jsonl(tmp_path / "in.jsonl", texts))], str(tmp_path / "out")
    monkeypatch.setattr(sources, "UNIT_BYTES", 5000)

    def cut_short(parts, **_):
        for file in (*Path(parts).glob("bucket-*"), *Path(parts).glob("unit-000001*")):
            file.unlink()
        raise KeyboardInterrupt

    if cut == "at another start":
        with patch("data.writer.write_manifest", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            prepare(source, output, **alone)
    with patch("shutil.rmtree", cut_short), pytest.raises(KeyboardInterrupt):
        prepare(source, output, **alone, block_mb=8 if cut == "at the end" else 0.01)
    assert not list(Path(output).glob(".parts/unit-*")) or cut == "at another start", "no start would take them up"
    prepare(source, output, **alone, overwrite=cut == "at the end")
    assert documents_of(tmp_path / "out") == Counter(texts)


def test_the_files_of_others_in_the_folder_are_kept(texts, alone, tmp_path):
    """Also those that the Hugging Face Hub names much as we name shards."""
    source, output = write_jsonl(tmp_path / "in.jsonl", texts), tmp_path / "out"
    output.mkdir()
    others = ["train-00000-of-00002.parquet", "train-00000.arrow.bak", "train-0.arrow"]
    shards = ["train-00099.arrow", "train-00099.lengths", ".validation-00001.arrow.tmp", "train-100000.arrow"]
    for name in (*others, *shards):
        (output / name).write_bytes(b"old")
    prepare([str(source)], str(output), **alone)
    assert all((output / name).read_bytes() == b"old" for name in others)
    assert not any((output / name).exists() for name in shards)


def test_a_worker_that_the_system_kills_is_one_line(texts, tokenizer_folder, tmp_path):
    source, code = (
        write_jsonl(tmp_path / "in.jsonl", texts),
        "prepare._write_sorted = lambda *_: os.kill(os.getpid(), 9)\n",
    )
    words = [f"--source={source}", f"--output={tmp_path / 'out'}", f"--tokenizer={tokenizer_folder}", "--processes=2"]
    process = start_script(tmp_path / "killed.py", code, *words)
    said = process.communicate()[1]
    assert process.returncode == 1
    assert "error: the system killed a worker" in said
    assert "Traceback" not in said


def test_nothing_is_written_into_a_folder_that_is_written_to(texts, alone, tmp_path):
    source, output = str(write_jsonl(tmp_path / "in.jsonl", texts)), tmp_path / "out"
    with writer.locked(output), pytest.raises(DataError, match="/out: another process is writing there"):
        prepare([source], str(output), **alone)


def test_a_finished_dataset_is_replaced_only_when_asked_and_never_read_in_part(texts, alone, tmp_path):
    given = [str(write_jsonl(tmp_path / "in.jsonl", texts))], str(tmp_path / "out")
    prepare(*given, **alone)
    before = contents(tmp_path / "out")
    with pytest.raises(DataError, match="already holds a finished dataset; give --overwrite"):
        prepare(*given, **alone)
    assert contents(tmp_path / "out") == before
    with patch("data.writer.write_manifest", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        prepare(*given, overwrite=True, **alone)
    assert not (tmp_path / "out" / "manifest.json").exists()
    prepare(*given, overwrite=True, **alone)
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl, line at byte 14: must be a JSON object"),
        ("a.jsonl", b'[{"text": "x"}]', r"a\.jsonl, line at byte 0: must be a JSON object \(an array .* a \.json file"),
        ("a.json", b'[{"text": "x"}, ', r"a\.json: cannot be read: JSONDecodeError: .* column 17"),
        ("a.jsonl", b'{"body": "x"}\n', r"line at byte 0: no text under 'text'; it has body; choose with --keys"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "cut \\ud83d here"}\n',
            r"a\.jsonl, line at byte 14: .* '\\ud83d' .*surrogates",
        ),
        ("a.json", b'[{"text": "x"}, 3]', r"a\.json, record 1: must be a JSON object: 3"),
        ("a.jsonl", b"\n", "holds no text that can be used: nothing to prepare"),
        ("a.parquet", b"PAR1", r"a\.parquet: cannot be read: .*Parquet file size is 4 bytes"),
        ("a.txt", b"abc\xff", r"a\.txt: .*utf-8.* byte 0xff in position 3"),
        ("a.jsonl.gz", b"not gzip", r"a\.jsonl\.gz"),
    ],
)
def test_bad_input_is_named(tmp_path, name, content, message, capsys):
    (tmp_path / name).write_bytes(content)
    words = ["--output", str(tmp_path / "out"), f"--processes={2 if name == 'a.txt' else 1}"]
    words += ["--source", str(tmp_path / name)]
    with pytest.raises(SystemExit):
        main(words)
    assert re.search(f"^error: .*{message}", capsys.readouterr().err, re.MULTILINE)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_bad_records_are_left_out_counted_and_listed(texts, alone, tmp_path, monkeypatch, capsys):
    """The same ones whatever the processes and kills, each with its place, which is counted here."""
    monkeypatch.setattr(sources, "UNIT_BYTES", 3000)
    bad = [b'{"text": "cut \xe2\x82"}', b'{"text": null}', b'{"text": "\\ud83d"}', b"no JSON", b'["text"]']
    lines = [json.dumps({"text": text}).encode() for text in texts]
    expected = []
    for i, line in enumerate(bad * 3):
        lines.insert(20 * i + 7, line)
        expected.append(f"{tmp_path}/in.jsonl, line at byte {sum(len(line) + 1 for line in lines[: 20 * i + 7])}")
    (tmp_path / "in.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    source = str(tmp_path / "in.jsonl")
    command = ["--source", source, "--tokenizer", alone["tokenizer"], "--output", str(tmp_path / "out"), "--dry-run"]
    for allowed, code in ((14, 1), (15, 0)):
        with pytest.raises(SystemExit) as ended:
            main([*command, f"--skip-bad={allowed}"])
        *said, last = capsys.readouterr().out.splitlines()
        assert [line.split(": ")[0] for line in said] == expected
        assert (last, ended.value.code) == ("documents 400, bad records 15", code)
    assert not (tmp_path / "out").exists()
    made = []
    for processes in (1, 3):
        output = tmp_path / f"out{processes}"
        options = alone | {"processes": processes}
        with pytest.raises(DataError, match="15 bad records are more than --skip-bad 14"):
            prepare([source], str(output), skip_bad=14, **options)
        with patch("data.writer.write_manifest", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            prepare([source], str(output), skip_bad=15, **options)
        assert prepare([source], str(output), skip_bad=15, **options)["bad_records"] == 15
        assert (output / "bad_records.txt").read_text().splitlines() == said
        assert documents_of(output) == Counter(texts)
        made.append(contents(output))
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--shard-mb=0", "--shard-mb 0.0: must be from"),
        ("--block-mb=inf", "--block-mb inf: must be from"),
        ("--validation-fraction=nan", "--validation-fraction nan: must be from 0 to 1"),
        ("--tokenizer=nothing", "nothing"),
        ("--source=nothing.txt", "--source nothing.txt: no files there"),
        ("--output=s3://bucket/out", "--output s3://bucket/out: must be"),
        ("--output=a.txt/out", "a.txt/out"),
        ("--vocab-size=256", "--vocab-size 256: must be at least 257"),
        ("--vocab-size=300 --tokenizer=T", "--vocab-size 300: is to train"),
        ("--eos-token=</s>", "--eos-token </s>: needs --tokenizer"),
        ("--skip-bad=-1", "--skip-bad -1: must be at least 0"),
        ("--hold-out-pieces", "--hold-out-pieces: needs"),
        ("--keys=a,b", "--keys a,b: must be as many"),
        ("--source=a.txt --keys=body", "--keys body: no effect"),
        ("--separator=x", "--separator 'x': no effect"),
        ("--seq-len=8", "--seq-len 8: no effect with --format text"),
        ("--train-eos", "--train-eos True: no effect with --format text"),
        ("--format=sft", "--format sft: give the --tokenizer"),
        ("--seq-len=1 --format=chat --tokenizer=T", "--seq-len 1: must be at least 2"),
    ],
)
def test_options_that_make_no_sense_are_refused(texts, tokenizer_folder, tmp_path, monkeypatch, flags, message, capsys):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", texts)
    Path("a.txt").write_text("text")
    files = set(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        main(["--source=in.jsonl", "--output=out", *flags.replace("=T", f"={tokenizer_folder}").split()])
    assert f"\nerror: {message}" in f"\n{capsys.readouterr().err}"
    assert set(tmp_path.iterdir()) == files


def test_a_separator_that_does_not_occur_is_told(alone, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sources, "UNIT_BYTES", 100)  # the separator of most.txt is in one unit of many
    words = "word " * 100
    contents = {"never.txt": words, "most.txt": f"{words}\n---\n{words}", "end.txt": "one\n---\n", "empty.txt": ""}
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    given = [str(tmp_path / "*.txt")], str(tmp_path / "out")
    options = alone | {"overwrite": True, "separator": "\\n---\\n"}
    prepare(*given, **options)
    undivided = f"does not occur in 1 of 4 texts, such as {tmp_path}/never.txt; each of these is one document"
    assert caplog.messages == [f"--separator '\\n---\\n': {undivided}"]
    assert documents_of(tmp_path / "out") == Counter([words, words, words, "one"])
    caplog.clear()
    (tmp_path / "never.txt").unlink()
    prepare(*given, **options)
    assert not caplog.messages


def test_a_vocabulary_that_a_text_is_too_small_for_is_told(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("abab")
    prepare([str(tmp_path / "a.txt")], str(tmp_path / "out"), vocab_size=300, validation_fraction=0)
    assert caplog.messages == ["--vocab-size 300: the text has no more than 259 tokens to learn"]
    caplog.clear()
    prepare([str(tmp_path / "a.txt")], str(tmp_path / "out"), vocab_size=258, validation_fraction=0, overwrite=True)
    assert not caplog.messages


def test_compressed_text_makes_as_many_files_as_it_holds_text_for(alone, tmp_path):
    """About: what is compressed counts as five times as long."""
    lines = write_jsonl(tmp_path / "a.jsonl", [f"{i} {'word ' * 40}" for i in range(500)]).read_bytes()
    compressed = gzip.compress(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(compressed)
    megabytes = len(compressed) / 4 * 2 / 2**20  # two bytes for a token, which is about four of text
    source, output = str(tmp_path / "a.jsonl.gz"), str(tmp_path / "out")
    manifest = prepare([source], output, shard_mb=megabytes, validation_fraction=0, **alone)
    assert len(manifest["shards"]) == 5


@pytest.mark.parametrize(("name", "units"), [("array.json.gz", 1), ("array.json", 1), ("lines.json", 2)])
def test_a_json_file_holds_an_array_or_lines(texts, tmp_path, monkeypatch, name, units):
    """Only lines are divided among processes."""
    records = [{"text": text, "more": [{}]} for text in texts]
    text = "\ufeff \n" + json.dumps(records, indent=2, ensure_ascii=False)
    if name == "lines.json":
        text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    monkeypatch.setattr(sources, "UNIT_BYTES", len(text) // 2 + 1)
    assert len(sources.plan_units(sources.list_files([str(tmp_path / name)]))) == units
    assert documents_in(tmp_path / name) == texts


@pytest.mark.parametrize(
    ("fraction", "said"),
    [("0", "nothing is held out: raise"), ("1", "everything is held out: lower"), ("0.5", "")],
)
def test_a_split_without_documents_is_told(texts, alone, tmp_path, capsys, fraction, said):
    write_jsonl(tmp_path / "in.jsonl", texts)
    words = [f"--output={tmp_path / 'out'}", f"--tokenizer={alone['tokenizer']}", f"--validation-fraction={fraction}"]
    main([f"--source={tmp_path / 'in.jsonl'}", *words])
    lines = [line for line in capsys.readouterr().out.splitlines() if "held out" in line]
    assert len(lines) == bool(said)
    assert all(line.startswith(said) for line in lines)


@pytest.mark.parametrize(("name", "dialect"), [("a.csv.gz", "excel"), ("a.tsv", "excel-tab")])
def test_csv_gives_the_records_that_pythons_csv_module_wrote(texts, tmp_path, name, dialect):
    """Also with line ends and quotes in a text, and with texts longer than that module reads by default."""
    long = [*texts, "x" * 200_000, 'a "quoted" word,\r\nand a\ttab']
    table = io.StringIO(newline="")
    csv.writer(table, dialect).writerows([["number", "body"], *enumerate(long)])
    content = table.getvalue().encode("utf-8-sig")
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert documents_in(tmp_path / name, ["body"]) == long


def test_bad_rows_of_csv_are_named(alone, tmp_path):
    (tmp_path / "bad.csv").write_bytes(b"body,n\none,1\ntwo,2,3\n\xff,4\n,5\nfive\n")
    options = alone | {"keys": "body", "validation_fraction": 0}
    prepare([f"{tmp_path}/bad.csv"], str(tmp_path / "out"), skip_bad=2, **options)
    assert documents_of(tmp_path / "out") == Counter(["one", "five"])
    surplus, not_utf8 = (tmp_path / "out" / writer.BAD_RECORDS).read_text().splitlines()
    assert surplus == f"{tmp_path}/bad.csv, row 1: has 1 cells more than the first line names"
    assert re.match(r".*bad\.csv, row 2: .*surrogates not allowed", not_utf8)
    (tmp_path / "open.csv").write_text('body\n"never closed\n')
    with pytest.raises(DataError, match=r"open\.csv: cannot be read: ValueError: line 2: unexpected end of data"):
        prepare([f"{tmp_path}/open.csv"], str(tmp_path / "other"), **options)


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_texts_in_arrow_are_read_as_those_in_parquet(texts, tmp_path, kind):
    table = pa.table({"n": range(len(texts)), "text": texts})
    new = {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}[kind]
    with new(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=150)
    assert documents_in(tmp_path / "a.arrow") == texts
    with pytest.raises(DataError, match=r"a\.arrow, row 0: no text under 'body'; it has n, text"):
        documents_in(tmp_path / "a.arrow", ["body"])


def test_a_damaged_page_of_parquet_is_named_where_it_has_a_checksum(tmp_path):
    file, column = tmp_path / "a.parquet", {"text": ["abcdefgh" * 1000] * 9}
    options = {"use_dictionary": False, "write_statistics": False, "write_page_checksum": True}
    pq.write_table(pa.table(column), file, compression="zstd", **options)
    damaged = bytearray(file.read_bytes())
    damaged[pq.ParquetFile(file).metadata.row_group(0).column(0).total_compressed_size // 2] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read: .*checksum verification failed"):
        documents_in(file)


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


def test_a_file_is_read_once_whatever_its_names(tmp_path, monkeypatch):
    """Links are followed, to folders, too, as in the Hugging Face cache, where every file of a snapshot is a link."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0123").write_text("hello")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "a.txt").symlink_to("../blobs/0123")
    (tmp_path / "snapshot" / "b.txt").write_text("b")
    (tmp_path / "link").symlink_to("snapshot")
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "more").symlink_to("../snapshot")
    monkeypatch.chdir(tmp_path / "snapshot")
    names = ["a.txt", "./", "../link", "../link/a.txt", "../l*/../snapshot/*.txt", "../all"]
    for source in (names, ["../all"], ["./*"]):
        found = sources.list_files(source)
        assert [(Path(file.url).name, file.size) for file in found] == [("a.txt", 5), ("b.txt", 1)]
    (tmp_path / "snapshot" / "c.txt").symlink_to("../nowhere")
    with pytest.raises(DataError, match=r"cannot be listed: .*No such file or directory: .*c\.txt"):
        sources.list_files(["."])


def test_a_file_that_several_sources_name_is_read_once_and_that_is_told(tmp_path, caplog):
    """By the same path, a link, a hard link or a URL."""
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    os.link(tmp_path / "a.jsonl", tmp_path / "hard.jsonl")
    (tmp_path / "soft.jsonl").symlink_to("a.jsonl")
    first = str(tmp_path / "a.jsonl")
    told = "files are in the list already, by this or another name; each is read once"
    for other in (first, f"{tmp_path}/hard.jsonl", f"{tmp_path}/soft.jsonl", f"file://{first}"):
        assert [file.url for file in sources.list_files([first, other])] == [first]
        assert caplog.messages == [f"--source {other}: 1 of 1 {told}"]
        caplog.clear()
    assert [file.url for file in sources.list_files([str(tmp_path)])] == [first]
    assert caplog.messages == [f"--source {tmp_path}: 2 of 3 {told}"]


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
    real = {os.path.relpath(os.path.realpath(file.url), tmp_path / "loop") for file in found}
    assert real == {*names.split()}
    assert len(found) == len(real)


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
    for silent in (unit, table):
        name = re.escape(silent.files[0].url)
        with pytest.raises(DataError, match=f"{name}: cannot be read: the server has sent"):
            list(sources.documents(silent, ["text"]))


def test_a_folder_that_may_not_be_read_is_not_taken_for_an_empty_one(tmp_path):
    """Its text would be missing from the dataset."""
    refused = PermissionError(errno.EACCES, "Permission denied", "in/folder")
    with patch("os.scandir", side_effect=refused), pytest.raises(DataError, match=r"cannot be listed: .*denied: 'in/f"):
        sources.list_files([str(tmp_path)])


# ---------------------------------------------------------------- tokenizers


def llama3_like(texts, folder: Path, template: str) -> Path:
    """A byte-level BPE with Llama 3's special tokens and a template."""
    train_tokenizer(texts, 350).save(folder)
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    names = ["<|begin_of_text|>", "<|end_of_text|>"]
    raw.add_special_tokens([AddedToken(name, special=True) for name in names])
    raw.post_processor = TemplateProcessing(template, special_tokens=[(name, raw.token_to_id(name)) for name in names])
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").unlink()
    return folder


@pytest.mark.parametrize("template", ["<|begin_of_text|> $A", "<|begin_of_text|> $A <|end_of_text|>"])
def test_llama3_documents_have_one_bos_and_one_eos(texts, tmp_path, template):
    """Also where the template itself adds an eos, and where the text spells special tokens out."""
    tokenizer = load_tokenizer(llama3_like(texts, tmp_path, template))
    bos, eos = (tokenizer.raw.token_to_id(name) for name in ("<|begin_of_text|>", "<|end_of_text|>"))
    for text in ["plain", "<|begin_of_text|>spelt out<|end_of_text|>", ""]:
        (document,) = tokenizer.encode_documents([text])
        assert (document[0], document[-1]) == (bos, eos) == (tokenizer.prefix[0], tokenizer.eos_id)
        assert document.count(bos) == document.count(eos) == 1
        assert tokenizer.decode(document) == text
        assert tokenizer.encode(text) == document[:-1]


def test_which_token_ends_a_document(texts, tmp_path):
    folder = llama3_like(texts, tmp_path, "$A")
    assert load_tokenizer(folder).eos_token == "<|end_of_text|>"
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    assert load_tokenizer(folder).eos_token == "<|endoftext|>"
    assert load_tokenizer(folder, "<|begin_of_text|>").eos_token == "<|begin_of_text|>"
    with pytest.raises(TitaniteError, match=r"has no token '<pad>'; .*<\|end_of_text\|>"):
        load_tokenizer(folder, "<pad>")


def test_a_text_is_neither_cut_nor_padded_as_its_tokenizer_was_told(texts, tmp_path):
    """As in the tokenizer.json of many models for search."""
    raw = train_tokenizer(texts, 300).raw
    raw.enable_truncation(4)
    raw.enable_padding(length=9)
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    for text in ("a", texts[0] * 3):
        (document,) = tokenizer.encode_documents([text])
        assert tokenizer.decode(document) == tokenizer.decode(tokenizer.encode(text)) == text


def byte_level(texts, token: AddedToken, template: str = "$A") -> RawTokenizer:
    raw = train_tokenizer(texts, 300).raw
    raw.add_tokens([token])
    names = [name for name in template.split() if name != "$A"]
    raw.post_processor = TemplateProcessing(template, special_tokens=[(name, raw.token_to_id(name)) for name in names])
    return raw


@pytest.mark.parametrize("kind", ["not special", "Unigram", "between spaces"])
def test_a_token_that_a_text_can_spell_out_does_not_end_documents(texts, kind):
    if kind == "not special":
        raw = byte_level(texts, AddedToken("</s>", special=False))
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


@pytest.mark.parametrize(("template", "bos"), [("</s> $A", []), ("</s> <|endoftext|> $A </s>", ["<|endoftext|>"])])
def test_an_eos_that_the_template_puts_before_a_text_is_left_out(texts, template, bos):
    """OPT's and GPT-2's bos is their eos."""
    raw = byte_level(texts, AddedToken("</s>", special=True), template)
    tokenizer = Tokenizer(raw, "</s>")
    assert [raw.id_to_token(token) for token in tokenizer.prefix] == bos
    (document,) = tokenizer.encode_documents(["text"])
    assert document.count(tokenizer.eos_id) == 1
    assert document[-1] == tokenizer.eos_id


def test_which_template_a_tokenizer_has(tokenizer_folder, tmp_path):
    """A file of its own goes first, as in transformers."""
    folder = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    for declared, expected in ((None, ""), ("one", "one"), (several, "plain")):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": None, "chat_template": declared}))
        assert load_tokenizer(folder).chat_template == expected
    (folder / "chat_template.jinja").write_text("file")
    assert load_tokenizer(folder).chat_template == "file"


# ---------------------------------------------------------------- other projects' tokens


def test_token_ids_are_converted_with_one_eos_for_each_document(texts, tokenizer_folder, tmp_path, monkeypatch):
    """The last one may lack it."""
    tokenizer = load_tokenizer(tokenizer_folder)
    documents, eos = [tokenizer.encode(text) for text in texts], tokenizer.eos_id
    ids = [eos, 5, 6, eos, 7, eos, eos, 8, eos, *chain.from_iterable([*document, eos] for document in documents)]
    np.array(ids[:-1], "<u2").tofile(tmp_path / "a.bin")
    monkeypatch.setattr(convert_module, "IDS_AT_ONCE", 7)
    source, output = str(tmp_path / "a.bin"), tmp_path / "out"
    options = {"dtype": "uint16", "shard_mb": 0.01, "validation_fraction": 0.1}
    manifest = convert([source], str(output), str(tokenizer_folder), **options)
    stored = {split: [tuple(d) for block in stored_blocks(output, split) for d in block] for split in SPLITS}
    assert Counter(stored["train"] + stored["validation"]) == Counter((*d, eos) for d in [[5, 6], [7], [8], *documents])
    assert 15 < len(stored["validation"]) < 75
    sizes = [shard["tokens"] * 2 / 2**20 for shard in manifest["shards"] if shard["split"] == "train"]
    assert len(sizes) > 1
    assert all(0.01 <= size < 0.012 for size in sizes[:-1])
    verify.main([str(output)])


def llm_c_header(magic: int, dtype: str, ids: list[int]) -> bytes:
    return np.array([magic, 1, len(ids), *[0] * 253], "<i4").tobytes() + np.array(ids, dtype).tobytes()


@pytest.mark.parametrize("layout", ["<u4", "<i8", "GPT-2 header", "Llama 3 header", "npy"])
def test_ids_are_read_as_they_were_written(layout, tmp_path):
    rng = random.Random(0)
    documents = [[*(rng.randrange(1, 399) for _ in range(rng.randint(2, 20))), 0] for _ in range(50)]
    ids = list(chain.from_iterable(documents))
    headers = {"GPT-2 header": (20240520, "<u2"), "Llama 3 header": (20240801, "<u4")}
    options = {}
    with (tmp_path / "a.bin").open("wb") as file:
        if layout == "npy":
            np.save(file, np.array(ids, "<i4"))
        elif layout in headers:
            file.write(llm_c_header(*headers[layout], ids))
        else:
            file.write(np.array(ids, layout).tobytes())
            options["dtype"] = layout.replace("<u4", "uint32").replace("<i8", "uint64")
    word_tokenizer(400).save(tmp_path)
    convert([str(tmp_path / "a.bin")], str(tmp_path / "out"), str(tmp_path), validation_fraction=0, **options)
    assert [d for block in stored_blocks(tmp_path / "out") for d in block] == documents


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"\0\0", {}, r"--source .*a\.bin: holds no documents"),
        (b"\1\0\x90\1", {}, r"a\.bin: token 1: id 400 is not in the tokenizer's vocabulary of 400"),
        (b"\1\1\2\1" * 9, {}, r"a\.bin: none of its 18 ids ends a document, as 0 would"),
        (b"\1\0\0\0", {"dtype": ""}, r"a\.bin: name the --dtype of its ids, one of uint8, uint16"),
        (llm_c_header(20240520, "<u4", [7, 8, 0]), {}, r"a\.bin: its header says 3 ids of uint16, it holds 6"),
        (llm_c_header(20240801, "<u4", [7, 8, 0]), {}, r"a\.bin: --dtype uint16: its header says uint32"),
        (b"PAR1", {}, r"a\.bin: --dtype uint16 is for files of bare ids"),
        (b"odd", {}, r"a\.bin: cannot be read: .*multiple"),
        (b"\1\0\0\0", {"packed": True}, r"a\.bin: --column and --packed are for Arrow and Parquet"),
    ],
)
def test_tokens_that_cannot_be_converted_are_named(tokenizer_folder, tmp_path, content, options, message):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(DataError, match=message):
        convert(
            [str(tmp_path / "a.bin")], str(tmp_path / "out"), str(tokenizer_folder), **{"dtype": "uint16"} | options
        )
    assert not (tmp_path / "out").exists()


TABLES = {
    "Arrow file": ("a.arrow", pa.ipc.new_file),
    "Arrow stream": ("a.arrow", pa.ipc.new_stream),
    "unnamed Arrow file": ("a.tokens", pa.ipc.new_file),
    "Parquet": ("a.parquet", pq.ParquetWriter),
}


def write_table(folder: Path, kind: str, columns: dict[str, pa.Array]) -> str:
    name, writer_of = TABLES[kind]
    table = pa.table(columns)
    with writer_of(folder / name, table.schema) as file:
        for first in range(0, len(table), 3):  # several batches
            file.write_table(table.slice(first, 3))
    return str(folder / name)


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize(
    "list_of",
    [pa.list_(pa.int8()), pa.large_list(pa.uint64()), pa.list_(pa.int32(), 3)],
    ids=["list", "large", "fixed"],
)
def test_tokens_in_tables_are_documents_by_the_row(kind, list_of, tokenizer_folder, tmp_path):
    rows = [[5, 6, 0], [7, 8, 9], [3, 0, 4], [1, 0, 2], [0, 0, 0]]  # 0 is eos
    rows += [None] * (kind != "Parquet")  # it has no fixed lists with null
    source = write_table(tmp_path, kind, {"n": pa.array(range(len(rows))), "input_ids": pa.array(rows, list_of)})
    convert([source], str(tmp_path / "out"), str(tokenizer_folder), validation_fraction=0)
    assert stored_blocks(tmp_path / "out") == [[[5, 6, 0], [7, 8, 9, 0], [3, 0], [4, 0], [1, 0], [2, 0]]]
    convert([source], str(tmp_path / "out"), str(tokenizer_folder), validation_fraction=0, packed=True, overwrite=True)
    assert stored_blocks(tmp_path / "out") == [[[5, 6, 0], [7, 8, 9, 3, 0], [4, 1, 0], [2, 0]]]


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"n": [1], "text": ["a"]}, {}, r"one column of lists of integers; it has n \(int64\), text \(string\)"),
        ({"ids": [[1]], "mask": [[1]]}, {}, r"--column \['ids', 'mask'\]: must be one column .*; it has ids \(list"),
        ({"ids": [[1]]}, {"column": "id"}, r"--column id: must be one column of lists of integers; it has ids \(list"),
        ({"ids": [[1, None]]}, {}, "column 'ids' holds null in place of an id"),
        ({"ids": [[1], [2, -1]]}, {}, r"token 2: id -1 is not in the tokenizer's vocabulary of 400, read as int64"),
        ({"ids": [[1]] * 8 + [[2, 400]]}, {}, "token 9: id 400 is not in the tokenizer's vocabulary of 400"),
        ({"ids": [[1, 2]]}, {"packed": True}, "none of its 2 ids ends a document"),
    ],
)
def test_tables_without_tokens_say_what_they_hold(columns, options, message, tokenizer_folder, tmp_path):
    source = write_table(tmp_path, "Parquet", {name: pa.array(values) for name, values in columns.items()})
    with pytest.raises(DataError, match=f"{source}: .*{message}"):
        convert([source], str(tmp_path / "out"), str(tokenizer_folder), **options)
    assert not (tmp_path / "out").exists()


def test_files_of_ids_that_are_empty_or_named_twice_are_told(tokenizer_folder, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    for name, ids in (("a.bin", [0, 0]), ("b.bin", [5, 6, 0, 7, 8, 0])):
        np.array(ids, "<u2").tofile(name)
    Path("link.bin").symlink_to("b.bin")
    options = {"tokenizer": str(tokenizer_folder), "dtype": "uint16", "validation_fraction": 0}
    with pytest.raises(DataError, match=r"--source link\.bin: is the same file as b\.bin"):
        convert(["b.bin", "link.bin"], "out", **options)
    convert(["a.bin", "b.bin"], "out", **options)
    assert stored_blocks(Path("out")) == [[[5, 6, 0], [7, 8, 0]]]
    assert caplog.messages == ["--source a.bin: holds no documents"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keys": "body"}, "under 'body'"),
        ({"format": "chat", "seq_len": 8, "keys": "text"}, "must be a list of messages"),
    ],
)
def test_a_mistyped_option_leaves_the_dataset_that_it_was_to_replace(alone, tmp_path, options, message):
    given = [str(write_jsonl(tmp_path / "in.jsonl", ["some text"] * 99))], str(tmp_path / "out")
    prepare(*given, **alone)
    before = contents(tmp_path / "out")
    with pytest.raises(TitaniteError, match=message):
        prepare(*given, **alone, **options, overwrite=True)
    assert contents(tmp_path / "out") == before


def test_every_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced, named, fsync, replace = [], [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    monkeypatch.setattr(Path, "replace", lambda self, name: (named.append(str(self)), replace(self, name)))
    write_dataset(tmp_path / "set", [[[1, 2, 0]]], validation=[[5, 0]])
    assert len(named) == 6
    assert synced == named
    names = [Path(name).name for name in named]  # a kill leaves no tokenizer without its eos, and no dataset half
    assert names.index(".tokenizer_config.json.tmp") < names.index(".tokenizer.json.tmp")
    assert names[-2:] == [".blocks.arrow.tmp", ".manifest.json.tmp"]

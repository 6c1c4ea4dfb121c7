"""From text to a dataset: every source, exact, the same bytes whatever happens on the way."""

import errno
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from datetime import datetime
from itertools import chain, islice
from pathlib import Path
from unittest.mock import Mock

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.spec import AbstractBufferedFile
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.processors import TemplateProcessing

from benchmarks import data as data_benchmark
from config import TitaniteError
from data import prepare as prepare_module
from data import sources
from data.prepare import count, main, prepare
from data.shards import DataError, open_dataset
from data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from data.workers import locked, worker_pool
from tests.corpus import stored_blocks, write_dataset
from tools import convert as convert_module
from tools import verify
from tools.convert import convert
from tools.convert import main as convert_main

ROOT = Path(__file__).parents[2]
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "naïve",
    "日本語",
    "def f(x):\n    return x\n",
    "🙂",
    "<|endoftext|>",
    "  ",
    "\r\n",
]


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
    """The documents of a split, each checked to end with its only eos and to be as long as it is said to be."""
    tokenizer = load_tokenizer(folder)
    found, lengths = [], [np.fromfile(file, "<u4").tolist() for file in sorted(folder.glob(f"{split}-*.lengths"))]
    assert [len(document) for block in stored_blocks(folder, split) for document in block] == [*chain(*lengths)]
    for block in stored_blocks(folder, split):
        for document in block:
            assert document.count(tokenizer.eos_id) == 1
            assert document[-1] == tokenizer.eos_id
            found.append(tokenizer.decode(document))
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture
def inputs(texts, tmp_path) -> dict[str, str]:
    """The same documents in every kind of source."""
    folder = tmp_path / "in"
    (folder / "files").mkdir(parents=True)
    for i, text in enumerate(texts):
        (folder / "files" / f"{i:04}.md").write_bytes(text.encode())
    (folder / "files" / "image.png").write_bytes(b"\x89PNG")
    jsonl = write_jsonl(folder / "a.jsonl", texts)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(jsonl.read_bytes()))
    compressed = pa.compress(jsonl.read_bytes(), codec="zstd", asbytes=True)
    (folder / "a.jsonl.zst").write_bytes(compressed)
    pq.write_table(pa.table({"n": range(len(texts)), "text": texts}), folder / "a.parquet", row_group_size=64)
    half = write_jsonl(folder / "b1.jsonl", texts[:200])
    write_jsonl(folder / "b2.jsonl", texts[200:])
    return {
        "folder": str(folder / "files"),
        "glob": str(half.with_name("b?.jsonl")),
        **{kind: str(folder / f"a.{kind}") for kind in ("jsonl", "jsonl.gz", "jsonl.zst", "parquet")},
    }


@pytest.mark.parametrize("kind", ["folder", "glob", "jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_every_source_gives_each_document_once(inputs, texts, tokenizer_folder, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(sources, "UNIT_BYTES", 3000)  # many units, cut in the middle of lines
    output = tmp_path / "out"
    prepare([inputs[kind]], str(output), tokenizer=str(tokenizer_folder), validation_fraction=0.1, processes=1)
    train, held_out = decoded(output, "train"), decoded(output, "validation")
    assert Counter(train + held_out) == Counter(texts)
    assert 15 < len(held_out) < 75
    numbers = [int(text.rpartition(" ")[2]) for text in train]  # the texts are numbered in the order of the input
    for later in (range(len(numbers)), [*numbers[1:], numbers[0]]):  # shuffled, and not file by file
        assert abs(np.corrcoef(numbers, later)[0, 1]) < 4 / len(numbers) ** 0.5
    assert not list(output.glob(".parts"))
    verify.main([str(output)])


def test_the_held_out_documents_depend_on_their_text_alone(texts, tokenizer_folder, tmp_path):
    held_out = []
    for name, order in (("a", texts), ("b", texts[::-1] + texts[:50])):
        file = write_jsonl(tmp_path / f"{name}.jsonl", order)
        prepare(
            [str(file)], str(tmp_path / name), tokenizer=str(tokenizer_folder), validation_fraction=0.1, processes=1
        )
        held_out.append(set(decoded(tmp_path / name, "validation")))
        assert not held_out[-1] & set(decoded(tmp_path / name, "train"))
    assert held_out[0] == held_out[1]


def test_the_pieces_of_a_text_are_all_held_out_or_none(texts, tokenizer_folder, tmp_path):
    source, held_out = str(write_jsonl(tmp_path / "in.jsonl", texts)), {}
    for name, longest in (("whole", 0), ("cut", 40)):
        options = {"tokenizer": str(tokenizer_folder), "validation_fraction": 0.2, "processes": 1}
        prepare([source], str(tmp_path / name), max_characters=longest, **options)
        held_out[name] = Counter(decoded(tmp_path / name, "validation"))
    cut = Counter(piece for text in held_out["whole"] for piece in sources.pieces(text, 40))
    assert len(cut) > len(held_out["whole"]) > 40
    assert held_out["cut"] == cut


def test_the_same_bytes_by_any_number_of_processes_and_parts(texts, tokenizer_folder, tmp_path, monkeypatch):
    file = write_jsonl(tmp_path / "in.jsonl", texts * 3)
    monkeypatch.setattr(sources, "UNIT_BYTES", 100_000)
    parts: list[str] = []
    write_part = prepare_module._write_part
    monkeypatch.setattr(
        prepare_module, "_write_part", lambda *part: (parts.append(part[-1].name), write_part(*part))[1]
    )
    made = []
    for processes, part_tokens in ((1, 2**20), (2, 2**20), (3, 2**20), (1, 1)):
        monkeypatch.setattr(prepare_module, "PART_TOKENS", part_tokens)
        monkeypatch.setattr(prepare_module, "BATCH_BYTES", 500 if part_tokens == 1 else 2**20)
        output = tmp_path / f"out{processes}-{part_tokens}"
        options = {"shard_mb": 0.01, "block_mb": 0.004, "validation_fraction": 0.1}
        prepare([str(file)], str(output), tokenizer=str(tokenizer_folder), processes=processes, **options)
        made.append(contents(output))
    assert made[0] == made[1] == made[2] == made[3]
    assert len([name for name in made[0] if name.startswith("train-") and name.endswith(".arrow")]) > 1
    assert {name.rpartition("-")[2] for name in parts} >= {"0000.arrow", "0001.arrow"}, "of a unit in several parts"


@pytest.mark.parametrize("unit_bytes", [1, 7, 20, 40, 41, 59, 10_000])
def test_units_cut_at_and_between_line_ends(tmp_path, monkeypatch, unit_bytes):
    """Each line belongs to one unit, in order; lines of 20 bytes, so that cuts fall on their ends, too."""
    texts = [f"{i:04}abc" for i in range(10)]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert file.stat().st_size == 200
    monkeypatch.setattr(sources, "UNIT_BYTES", unit_bytes)
    units = sources.plan_units(sources.list_files([str(file)]))
    assert [text for unit in units for text in sources.documents(unit, "text")] == texts


def test_more_units_than_files_may_be_open(texts, tokenizer_folder, tmp_path):
    file = write_jsonl(tmp_path / "in.jsonl", texts)
    code = (
        "import resource; from data import prepare, sources; sources.UNIT_BYTES = 400;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48));"
        f"prepare.prepare([{str(file)!r}], {str(tmp_path / 'out')!r}, tokenizer={str(tokenizer_folder)!r}, processes=1)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    assert Counter(decoded(tmp_path / "out", "train") + decoded(tmp_path / "out", "validation")) == Counter(texts)


def test_a_format_that_nothing_can_cut_is_read_as_a_whole(monkeypatch):
    """As one of a fork: what reads a file to its end would give each document once for every unit."""
    monkeypatch.setattr(sources, "UNIT_BYTES", 10)
    monkeypatch.setitem(sources.KINDS, ".csv", "csv")
    file = sources.File("a.csv", 25)
    assert sources.plan_units([file]) == [sources.Unit((file,), bytes=25)]


def test_small_files_share_units(monkeypatch):
    """A unit is closed by the file that fills it; empty files fill none."""
    monkeypatch.setattr(sources, "UNIT_BYTES", 10)
    sizes = {"a.txt": 0, "b.md": 9, "lines.jsonl": 15, "c.py": 0, "d.txt": 1, "packed.jsonl.gz": 30}
    sizes |= {"e.c": 0, "f.txt.gz": 25, "g.jsonl": 4, "h.parquet": 5, "i.jsonl.gz": 9, "j.jsonl": 0, "k.json": 9}
    files = [sources.File(name, size) for name, size in sizes.items()]
    a, b, lines, c, d, packed, e, f, g, h, i, j, k = files
    assert sources.plan_units(files) == [
        sources.Unit((lines,), 0, 10, 10),
        sources.Unit((lines,), 10, 15, 5),
        sources.Unit((a, b, c, d), bytes=10),
        sources.Unit((packed,), bytes=30),
        sources.Unit((e, f), bytes=25),
        sources.Unit((g, h, i), bytes=18),
        sources.Unit((j, k), bytes=9),
    ]
    assert sources.plan_units([a, c]) == [sources.Unit((a, c))]


def test_documents_of_small_files_of_every_kind_come_once(inputs, texts, tokenizer_folder, tmp_path, monkeypatch):
    """Several share a unit, and the bytes are the same by several processes."""
    monkeypatch.setattr(sources, "UNIT_BYTES", 200_000)
    files = sources.list_files(list(inputs.values()))
    units = sources.plan_units(files)
    assert 1 < len(units) < 6
    assert any(
        {sources.kind_of(file.url) for file in unit.files} >= {("jsonl", ""), ("jsonl", "gzip")} for unit in units
    )
    for processes in (1, 2):
        options = {"tokenizer": str(tokenizer_folder), "shard_mb": 0.01, "processes": processes}
        prepare(list(inputs.values()), str(tmp_path / f"out{processes}"), **options)
    assert contents(tmp_path / "out1") == contents(tmp_path / "out2")
    found = Counter(decoded(tmp_path / "out1", "train") + decoded(tmp_path / "out1", "validation"))
    assert found == Counter(texts * len(inputs))


@pytest.mark.parametrize("format", ["text", "sft"])
def test_shards_are_about_as_large_as_asked_where_the_estimate_is_far_off(tokenizer_folder, tmp_path, format):
    """What is compressed may hold a hundred times its size in text."""
    texts = [f"{i:05} " + "the same words again and again " * 20 for i in range(300)]
    lines = "".join(json.dumps({"text": text, "a": "b"}) + "\n" for text in texts)
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    options = {"tokenizer": str(tokenizer_folder), "shard_mb": 0.1, "block_mb": 0.004, "processes": 1}
    if format == "sft":
        options |= {"format": "sft", "seq_len": 2048, "example_keys": "text,a"}
    manifest = prepare([str(tmp_path / "in.jsonl.gz")], str(tmp_path / "out"), **options)
    verify.main([str(tmp_path / "out")])
    width = np.dtype(manifest["dtype"]).itemsize
    sizes = [shard["tokens"] * width / 2**20 for shard in manifest["shards"] if shard["split"] == "train"]
    assert len(sizes) > 1
    assert 0.05 < min(sizes) <= max(sizes) < 0.2
    if format == "text":
        assert sorted(decoded(tmp_path / "out", "train") + decoded(tmp_path / "out", "validation")) == texts


def test_planning_looks_at_each_small_file_a_few_times_only():
    reads = []

    class Counted(sources.File):
        @property
        def size(self) -> int:
            reads.append(self.url)
            return self[1]

    files = [Counted(f"/{number}.txt", 300 * (number % 2)) for number in range(2000)]
    assert sources.plan_units(files) == [sources.Unit(tuple(files), bytes=300_000)]
    assert len(reads) <= 3 * len(files)


def test_a_large_input_has_larger_units():
    files = [sources.File(f"/{i}.jsonl", 10**9) for i in range(1000)]
    units = sources.plan_units(files)
    assert 9_000 < len(units) < 12_000
    assert sum(unit.bytes for unit in units) == 10**12


def test_a_trained_tokenizer_is_the_same_every_time(texts, tmp_path):
    file = write_jsonl(tmp_path / "in.jsonl", texts)
    for name in "ab":
        prepare([str(file)], str(tmp_path / name), vocab_size=350, processes=1)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert load_tokenizer(tmp_path / "a").vocab_size == 350


def test_a_tokenizer_is_learnt_from_pieces_of_a_very_long_word():
    """The time to learn from a word grows with the square of its length: 40,000 letters took a second."""
    text = "x" * 2**14
    learnt = train_tokenizer([text], 300)
    assert max(map(len, learnt.raw.get_vocab())) == 2000
    assert learnt.decode(learnt.encode(text)) == text


def test_parts_of_an_input_that_was_cut_otherwise_are_not_used(texts, tokenizer_folder, tmp_path, monkeypatch):
    """By an earlier version, say: its unit 1 is not ours."""
    pq.write_table(pa.table({"text": texts}), tmp_path / "in.parquet", row_group_size=10)
    source, options = [str(tmp_path / "in.parquet")], {"tokenizer": str(tokenizer_folder), "processes": 1}
    prepare(source, str(tmp_path / "whole"), **options)
    with monkeypatch.context() as other:
        other.setattr(sources, "UNIT_BYTES", 1)
        other.setattr(sources, "MOST_UNITS", 10**9)
        other.setattr(prepare_module, "_write_bucket", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(source, str(tmp_path / "out"), **options)
    prepare(source, str(tmp_path / "out"), **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_parts_of_a_file_that_was_changed_at_the_same_size_are_not_used(texts, tokenizer_folder, tmp_path, monkeypatch):
    """Lines in another order, say: some would come twice and others never."""
    monkeypatch.setattr(sources, "UNIT_BYTES", 2_000)
    file, options = tmp_path / "in.jsonl", {"tokenizer": str(tokenizer_folder), "processes": 1}
    write_jsonl(file, texts)
    with monkeypatch.context() as other:
        other.setattr(prepare_module, "_write_bucket", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare([str(file)], str(tmp_path / "out"), **options)
    before = file.stat()
    write_jsonl(file, texts[::-1])
    os.utime(file, ns=(0, before.st_mtime_ns + 10**9))
    assert file.stat().st_size == before.st_size
    prepare([str(file)], str(tmp_path / "out"), **options)
    prepare([str(file)], str(tmp_path / "whole"), **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("protocol", ["", "file://", "local://"])
def test_a_file_that_is_changed_while_it_is_read_is_named(texts, tokenizer_folder, tmp_path, monkeypatch, protocol):
    """Else the units would be of both, and some documents come twice and others never."""
    monkeypatch.setattr(sources, "UNIT_BYTES", 20_000)
    file, original = write_jsonl(tmp_path / "in.jsonl", texts), prepare_module._tokenize_unit
    options = {"tokenizer": str(tokenizer_folder), "processes": 1}

    def change_then_tokenize(folder, plan, number, unit):
        if number == 1:
            write_jsonl(file, texts[::-1])
            os.utime(file, ns=(0, 1))
        return original(folder, plan, number, unit)

    with monkeypatch.context() as other:
        other.setattr(prepare_module, "_tokenize_unit", change_then_tokenize)
        with pytest.raises(DataError, match=r"in\.jsonl: was changed while it was read"):
            prepare([f"{protocol}{file}"], str(tmp_path / "out"), **options)
    prepare([f"{protocol}{file}"], str(tmp_path / "out"), **options)
    assert sorted(decoded(tmp_path / "out", "train") + decoded(tmp_path / "out", "validation")) == sorted(texts)


@pytest.mark.parametrize("progress", ["unit-", "bucket-"])
def test_after_sigkill_the_same_command_finishes_with_the_same_bytes(texts, tokenizer_folder, tmp_path, progress):
    file = write_jsonl(tmp_path / "in.jsonl", texts * 20)
    options = ["--source", str(file), "--tokenizer", str(tokenizer_folder), "--shard-mb", "0.05"]
    main([*options, "--output", str(tmp_path / "whole"), "--processes", "1"])
    output = tmp_path / "killed"
    # It kills itself right after the third record of progress: no race with a process that watches it.
    code = (
        "import os, signal; from data import prepare, sources; sources.UNIT_BYTES = 40_000\n"
        "real, seen = prepare.write_atomically, []\n"
        "def write(path, data):\n"
        "    real(path, data)\n"
        f"    seen.extend([path] * (path.name.startswith({progress!r}) and path.suffix == '.json'))\n"
        "    if len(seen) == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "prepare.write_atomically = write\n"
        f"prepare.main({[*options, '--output', str(output), '--processes', '1']!r})"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    assert process.returncode == -signal.SIGKILL
    assert not (output / "manifest.json").exists()
    done = {path: path.stat().st_mtime_ns for path in output.glob(f".parts/{progress}*.json")}
    assert len(done) == 3
    kept = next(iter(sorted(done)))
    os.utime(kept, ns=(1, 1))
    watched = []
    real = prepare_module.write_atomically

    def watch(path, data):
        watched.append(path.name)
        real(path, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_module, "write_atomically", watch)
        patch.setattr(sources, "UNIT_BYTES", 40_000)
        main([*options, "--output", str(output), "--processes", "1"])
        main([*options, "--output", str(tmp_path / "whole"), "--processes", "2", "--overwrite"])
    assert kept.name not in watched, "finished parts are not made again"
    assert contents(output) == contents(tmp_path / "whole")


@pytest.fixture
def workers_of_a_killed_run(texts, tokenizer_folder, tmp_path) -> Iterator[list[int]]:
    """Two workers that were stopped before they wrote a part of tmp_path/out, and then lost their parent."""
    (tmp_path / "pids").mkdir()
    (tmp_path / "killed.py").write_text(
        "import os, signal; from data import prepare, sources; sources.UNIT_BYTES = 20_000\n"
        "def stop():\n"
        f"    open({str(tmp_path / 'pids')!r} + f'/{{os.getpid()}}', 'w').close()\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "write_part = prepare._write_part\n"
        "prepare._write_part = lambda *part: (stop(), write_part(*part))\n"
        "if __name__ == '__main__':\n"
        f"    prepare.prepare([{str(write_jsonl(tmp_path / 'in.jsonl', texts))!r}], {str(tmp_path / 'out')!r},"
        f" tokenizer={str(tokenizer_folder)!r}, processes=2)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, tmp_path / "killed.py"], env=environment, stderr=subprocess.DEVNULL)
    while len(pids := [int(file.name) for file in (tmp_path / "pids").iterdir()]) < 2:
        assert parent.poll() is None
    while not all(state(pid) == "T" for pid in pids):
        pass
    parent.kill()
    parent.wait()
    yield pids
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def state(pid: int) -> str:
    """Of a process, by proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def test_a_new_start_waits_for_the_workers_of_a_killed_one(
    workers_of_a_killed_run, texts, tokenizer_folder, tmp_path, monkeypatch
):
    arguments = {"tokenizer": str(tokenizer_folder), "max_characters": 40, "processes": 1}
    prepare([str(tmp_path / "in.jsonl")], str(tmp_path / "whole"), **arguments)
    with monkeypatch.context() as patch:
        patch.setattr("data.workers.LOCK_SECONDS", 0)
        with pytest.raises(DataError, match=r"/out: another process is writing there; wait until it has ended"):
            prepare([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), **arguments)
    for pid in workers_of_a_killed_run:
        os.kill(pid, signal.SIGCONT)  # they find their parent gone, and end
    prepare([str(tmp_path / "in.jsonl")], str(tmp_path / "out"), **arguments)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_two_starts_do_not_write_into_one_folder(texts, tokenizer_folder, tmp_path, monkeypatch):
    source = [str(write_jsonl(tmp_path / "in.jsonl", texts))]
    arguments = {"output": str(tmp_path / "out"), "tokenizer": str(tokenizer_folder), "processes": 1}
    monkeypatch.setattr("data.workers.LOCK_SECONDS", 0)
    start, refused = prepare_module._start_or_go_on, []

    def start_twice(*rest):
        start(*rest)
        with pytest.raises(DataError, match="another process is writing there"):
            prepare(source, **arguments)
        refused.append(True)

    monkeypatch.setattr(prepare_module, "_start_or_go_on", start_twice)
    monkeypatch.setattr(prepare_module, "load_tokenizer", finish_first(lambda: prepare(source, **arguments)))
    with pytest.raises(DataError, match="already holds a finished dataset"):  # found only under the lock
        prepare(source, **arguments)
    assert refused
    assert Counter(decoded(tmp_path / "out", "train") + decoded(tmp_path / "out", "validation")) == Counter(texts)


def finish_first(other):
    """A `load_tokenizer` in whose first call another start begins and ends."""
    others = iter([other])

    def load(*arguments):
        for run in others:
            run()
        return load_tokenizer(*arguments)

    return load


@pytest.mark.parametrize("cut", ["before the manifest", "at the end", "at another start"])
def test_a_kill_while_parts_are_removed_loses_no_document(texts, tokenizer_folder, tmp_path, monkeypatch, cut):
    source, output = [str(write_jsonl(tmp_path / "in.jsonl", texts))], str(tmp_path / "out")
    arguments = {"tokenizer": str(tokenizer_folder), "processes": 1}
    monkeypatch.setattr(sources, "UNIT_BYTES", 5000)

    def cut_short(parts, **_):
        if not Path(parts).exists():
            return
        for file in (*Path(parts).glob("bucket-*"), *Path(parts).glob("unit-000001-*")):
            file.unlink()
        raise KeyboardInterrupt

    def interrupted(options, module, name, function=cut_short):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, function)
            with pytest.raises(KeyboardInterrupt):
                prepare(source, output, **arguments | options)

    if cut == "at the end":
        interrupted({}, shutil, "rmtree")
        assert not list(Path(output).glob(".parts/*.arrow")), "the same command is refused, so they would stay"
    else:
        interrupted({}, prepare_module, "write_manifest", Mock(side_effect=KeyboardInterrupt))
    if cut == "at another start":
        interrupted({"max_characters": 40}, shutil, "rmtree")
    prepare(source, output, **arguments, overwrite=cut == "at the end")
    assert Counter(decoded(tmp_path / "out", "train") + decoded(tmp_path / "out", "validation")) == Counter(texts)


@pytest.mark.parametrize("command", [prepare, convert])
def test_the_files_of_others_in_the_folder_are_kept(texts, tokenizer_folder, tmp_path, command):
    """Also those that the Hugging Face Hub names much as we name shards."""
    source, output, options = write_jsonl(tmp_path / "in.jsonl", texts), tmp_path / "out", {"processes": 1}
    if command is convert:
        write_nanogpt(tmp_path, [[5, 6]], 0)
        source, options = tmp_path / "a.bin", {"format": "nanogpt"}
    output.mkdir()
    others = [
        "train-00000-of-00002.parquet",
        "validation-00000-of-00001.parquet",
        "train-00000.arrow.bak",
        "train-0.arrow",
    ]
    shards = ["train-00099.arrow", "train-00099.lengths", "validation-00001.arrow.tmp", "train-100000.arrow"]
    shards += [".train-00001.lengths.tmp"]
    for name in (*others, *shards):
        (output / name).write_bytes(b"old")
    command([str(source)], str(output), tokenizer=str(tokenizer_folder), **options)
    assert all((output / name).read_bytes() == b"old" for name in others)
    assert not any((output / name).exists() for name in shards)


def test_there_are_as_many_processes_as_cores_that_may_be_used(texts, tokenizer_folder, tmp_path, monkeypatch):
    """A scheduler gives a job a few of a large node's; a small input is not worth the start of a process."""
    started = []
    monkeypatch.setattr(prepare_module, "worker_pool", lambda count, lock: (started.append(count), nullcontext())[1])
    file = write_jsonl(tmp_path / "in.jsonl", texts)
    for unit_bytes, cores in ((sources.UNIT_BYTES, 2), (1000, 1), (1000, 2)):
        monkeypatch.setattr(prepare_module, "UNIT_BYTES", unit_bytes)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        prepare([str(file)], str(tmp_path / f"out{unit_bytes}-{cores}"), tokenizer=str(tokenizer_folder))
    assert started == [1, 1, 2]


def test_a_worker_that_the_system_kills_is_one_line(texts, tokenizer_folder, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", texts)
    (tmp_path / "killed.py").write_text(
        "import os, signal; from data import prepare, sources; sources.UNIT_BYTES = 20_000\n"
        "prepare._write_part = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "if __name__ == '__main__':\n"
        f"    prepare.main(['--source', {str(source)!r}, '--output', {str(tmp_path / 'out')!r},"
        f" '--tokenizer', {str(tokenizer_folder)!r}, '--processes', '2'])\n"
    )
    command = [sys.executable, str(tmp_path / "killed.py")]
    result = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert result.returncode == 1
    assert "error: the system killed a worker" in result.stderr
    assert "Traceback" not in result.stderr


def test_other_options_do_not_go_on_from_old_parts(texts, tokenizer_folder, tmp_path, monkeypatch):
    file = write_jsonl(tmp_path / "in.jsonl", texts)
    arguments = {"tokenizer": str(tokenizer_folder), "processes": 1}

    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "write_shard", fail)
        with pytest.raises(KeyboardInterrupt):
            prepare([str(file)], str(tmp_path / "a"), **arguments, validation_fraction=0.5)
    prepare([str(file)], str(tmp_path / "a"), **arguments)
    prepare([str(file)], str(tmp_path / "b"), **arguments)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_finished_dataset_is_not_overwritten_by_accident(texts, tokenizer_folder, tmp_path):
    file = write_jsonl(tmp_path / "in.jsonl", texts)
    prepare([str(file)], str(tmp_path / "out"), tokenizer=str(tokenizer_folder), processes=1)
    before = contents(tmp_path / "out")
    with pytest.raises(DataError, match="already holds a finished dataset; give --overwrite"):
        prepare([str(file)], str(tmp_path / "out"), tokenizer=str(tokenizer_folder))
    assert contents(tmp_path / "out") == before
    prepare([str(file)], str(tmp_path / "out"), tokenizer=str(tokenizer_folder), overwrite=True, processes=1)
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("module", [prepare_module, convert_module])
def test_nothing_reads_a_dataset_that_is_replaced_in_part(texts, tokenizer_folder, tmp_path, monkeypatch, module):
    source, command, options = write_jsonl(tmp_path / "in.jsonl", texts), prepare, {"processes": 1}
    if module is convert_module:
        write_nanogpt(tmp_path, [[5, 6]], 0)
        source, command, options = tmp_path / "a.bin", convert, {"format": "nanogpt"}
    arguments = [str(source)], str(tmp_path / "out")
    command(*arguments, tokenizer=str(tokenizer_folder), **options)
    monkeypatch.setattr(module, "write_manifest", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        command(*arguments, tokenizer=str(tokenizer_folder), overwrite=True, **options)
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize(("command", "words"), [(main, ["--processes=1"]), (convert_main, ["--format=nanogpt"])])
@pytest.mark.parametrize(("fraction", "said"), [("1e-9", True), ("0", False), ("0.5", False), ("1", False)])
def test_that_nothing_is_held_out_is_said_at_once(tokenizer_folder, tmp_path, capsys, command, words, fraction, said):
    """Training, which validates unless told otherwise, would be refused."""
    tokens = np.array([[5, number, 0] for number in range(5, 65)], "<u2")  # all begin alike, as with a bos
    source = write_jsonl(tmp_path / "in.jsonl", [f"{'same ' * 50} {number}" for number in range(60)])
    if command is convert_main:
        tokens.tofile(source := tmp_path / "in.bin")
    output = str(tmp_path / "out")
    words = [*words, f"--source={source}", f"--output={output}", f"--tokenizer={tokenizer_folder}"]
    command([*words, f"--validation-fraction={fraction}"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"ready: {output}"
    assert lines[-2].startswith(f"nothing is held out: --validation-fraction {float(fraction):g} ") is said
    splits = {file.name.partition("-")[0] for file in Path(output).glob("*-*.arrow")}
    assert splits == {"0.5": {"train", "validation"}, "1": {"validation"}}.get(fraction, {"train"})
    assert not list(verify.faults(open_dataset(output)))


@pytest.mark.parametrize("output", [[], ["--output=out"]])
def test_a_dry_run_counts_and_writes_nothing(texts, tmp_path, monkeypatch, capsys, output):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", [*texts, ""])
    main(["--source", "in.jsonl", *output, "--dry-run"])
    assert "documents: 400\nempty: 1\n" in capsys.readouterr().out
    assert count(["in.jsonl"])["characters"] == sum(map(len, texts))
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_dry_run_reads_the_keys_it_is_given(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", ["text"])
    with pytest.raises(SystemExit, match="nothing under 'question'; it has id, text; choose with --example-keys"):
        main(["--source", str(source), "--dry-run", "--example-keys", "question"])


def test_only_a_dry_run_needs_no_output(capsys):
    with pytest.raises(SystemExit):
        main(["--source", "in.jsonl"])
    assert "required: --output" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl, line at byte 14: not JSON"),
        ("a.jsonl", b'{"body": "x"}\n', r"nothing under 'text'; it has body; choose with --text-key"),
        ("a.jsonl", b"{}\n", r"nothing under 'text'; it has no keys; choose with --text-key"),
        ("a.jsonl", b'{"text": 3}\n', r"line at byte 0: 'text' holds 3, which is no text"),
        ("a.jsonl", b'{"text": null}\n', r"line at byte 0: 'text' is null"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "cut \\ud83d here"}\n',
            r"line at byte 14: holds \\ud83d, a lone surrogate",
        ),
        ("a.jsonl", b"\n", "holds no text: nothing to prepare"),
        ("a.jsonl", b"", "holds no text: nothing to prepare"),
        ("a.json", b'[{"text": "x"}]', r"a\.json, line at byte 0: a JSON array; make it one object on each line"),
        ("a.json", b'\n [\n{"text": "x"}\n]\n', r"a\.json, line at byte 1: a JSON array"),
        ("a.py", b"# coding: rot13\n", r"a\.py: 'rot13' is not a text encoding"),
        ("a.py", b"# coding: undefined\n", r"a\.py: .*undefined encoding"),
        ("a.py", b"# coding: unicode_escape\n'\\ud800'\n", r"a\.py: .*surrogates not allowed"),
        ("a.parquet", b"PAR1", r"a\.parquet: cannot be read: Parquet file size is 4 bytes"),
        ("a.txt", b"abc\xff", r"a\.txt: not utf-8 text: invalid start byte at byte 3$"),
        ("a.arrow", b"\xff", r"at byte 0; all but \.jsonl \.ndjson \.json \.parquet.*, also compressed"),
        ("a.jsonl.gz", b"not gzip", r"a\.jsonl\.gz"),
        ("a.jsonl.gz", b"", r"a\.jsonl\.gz: is empty, so it is not compressed text"),
        pytest.param("a.jsonl", b'{"text": "x"}\n{"n": ' + b"[" * 10**6, "line at byte 14: not JSON", id="nested"),
    ],
)
def test_bad_input_is_named(tmp_path, name, content, message, capsys):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit, match=message):
        main(["--source", str(tmp_path / name), "--output", str(tmp_path / "out"), "--processes", "2"])
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("column", "keys", "message"),
    [
        (pa.array([b"a", b"b\xff"]).view(pa.string()), (), "not utf-8 text: invalid start byte at byte 1"),
        (pa.array([[datetime(2026, 1, 1)]]), ("text",), "cannot be written as JSON: .* datetime"),
        (pa.array([None]), ("text",), "'text' is null"),
        (pa.array(["a", None]), (), "'text' is null"),
    ],
)
def test_bad_rows_of_parquet_are_named(tmp_path, column, keys, message):
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    (unit,) = sources.plan_units(sources.list_files([str(tmp_path / "a.parquet")]))
    with pytest.raises(DataError, match=rf"a\.parquet, row {int(not keys)}: {message}"):
        list(sources.documents(unit, keys or "text"))


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_damaged_page_of_parquet_is_named_where_it_has_a_checksum(tmp_path, compression):
    file, column = tmp_path / "a.parquet", {"text": ["abcdefgh" * 1000] * 9}
    options = {"use_dictionary": False, "write_statistics": False, "write_page_checksum": True}
    pq.write_table(pa.table(column), file, compression=compression, **options)
    damaged = bytearray(file.read_bytes())
    damaged[pq.ParquetFile(file).metadata.row_group(0).column(0).total_compressed_size // 2] ^= 1
    file.write_bytes(damaged)
    (unit,) = sources.plan_units(sources.list_files([str(file)]))
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read: .* CRC checksum verification failed"):
        list(sources.documents(unit, "text"))


class CountedRows:
    """A record batch that counts how often rows of it are turned into Python."""

    def __init__(self, batch, sizes):
        self.batch, self.sizes = batch, sizes

    def __len__(self):
        return len(self.batch)

    def slice(self, first, count):
        return CountedRows(self.batch.slice(first, count), self.sizes)

    def to_pylist(self):
        self.sizes.append(len(self))
        return self.batch.to_pylist()


def test_rows_of_parquet_are_read_many_at_once_and_one_by_one_where_one_is_bad(texts, tmp_path, monkeypatch):
    read, sizes = pq.ParquetFile.iter_batches, []
    counted = lambda *args, **options: (CountedRows(batch, sizes) for batch in read(*args, **options))  # noqa: E731
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)

    def rows(column):
        pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet", row_group_size=150)
        (unit,) = sources.plan_units(sources.list_files([str(tmp_path / "a.parquet")]))
        return list(sources.documents(unit, "text"))

    assert rows(texts) == texts
    assert sum(sizes) == len(texts) > 20 * len(sizes)
    for bad in (0, 63, 64, 149, 150, 399):
        column = [text.encode() for text in texts]
        column[bad] = b"ab\xff"
        with pytest.raises(DataError, match=rf"a\.parquet, row {bad}: not utf-8 text: invalid start byte at byte 2"):
            rows(pa.array(column).view(pa.string()))


@pytest.mark.parametrize("name", ["c4.00000-of-00512.json.gz", "A.JSONL", "a.json", "a.Ndjson.ZST", "a.NDJSON"])
def test_json_lines_by_all_their_names(texts, tmp_path, name):
    content = write_jsonl(tmp_path / "lines", texts).read_bytes()
    codec = {".gz": "gzip", ".zst": "zstd"}.get(Path(name).suffix.lower())
    (tmp_path / name).write_bytes(pa.compress(content, codec, asbytes=True) if codec else content)
    units = sources.plan_units(sources.list_files([str(tmp_path / name)]))
    assert [text for unit in units for text in sources.documents(unit, "text")] == texts


def test_what_is_left_out_of_a_folder_is_said(tmp_path, caplog):
    read = ["a.TXT", "b.ndjson", "c.json.gz", "d.md.zst", "e.jsonl", "f.Parquet"]
    left_out = ["package.json", "a.png", "b.PNG", "c.csv.gz", "README"]
    for name in (*read, *left_out):
        (tmp_path / name).write_bytes(b"x")
    assert [Path(file.url).name for file in sources.list_files([str(tmp_path)])] == read
    assert f"--source {tmp_path}: files left out: 5 (2 with .png, " in caplog.text
    assert all(f"1 with {what}" in caplog.text for what in (".json", ".csv.gz", "no suffix"))
    caplog.clear()
    sources.list_files([str(tmp_path / "*.json"), str(tmp_path / "e.jsonl")])
    assert not caplog.text


class Store(fsspec.AbstractFileSystem):
    """A remote file system with one file, and blocks as large as those of s3fs."""

    protocol = "store"
    cachable = False
    content = (json.dumps({"text": "x" * 1000}) + "\n").encode() * 30_000
    fetched = reads = 0
    fault = ""

    def info(self, path: str, **_: object) -> dict[str, object]:
        self.fail("listed")
        size = None if Store.fault == "without size" else len(self.content)
        return {"name": path, "size": size, "type": "file"}

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **_: object) -> "StoreFile":
        self.fail("opened")
        return StoreFile(self, path, block_size=block_size or 50 * 2**20)

    def fail(self, when: str) -> None:
        if Store.fault == when:
            raise StoreError("gone")


class StoreFile(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        self.fs.fail("read")
        Store.fetched += end - start
        return b"" if Store.fault == "empty" else Store.content[start:end]

    def read(self, length: int = -1) -> bytes:
        Store.reads += 1
        return super().read(length)


class StoreError(Exception):
    """Of no kind that Python knows, as those of botocore and aiohttp."""


@pytest.fixture
def store(monkeypatch) -> type[Store]:
    fsspec.register_implementation("store", Store, clobber=True)
    for name, value in (("fetched", 0), ("reads", 0), ("fault", "")):
        monkeypatch.setattr(Store, name, value)
    return Store


def test_lines_of_a_remote_file_are_read_in_large_requests_but_not_far_beyond_the_unit(store, monkeypatch):
    monkeypatch.setattr(sources, "UNIT_BYTES", 2**20)
    unit = sources.plan_units(sources.list_files(["store://lines.jsonl"]))[3]
    assert 1000 < sum(1 for _ in sources.documents(unit, "text")) < 1050
    assert store.reads < 10
    assert store.fetched < 8 * 2**20 < len(store.content) / 3


@pytest.mark.parametrize(
    ("name", "fault", "message"),
    [
        ("a.jsonl", "listed", "--source store://a.jsonl: cannot be listed: StoreError: gone"),
        ("a.jsonl", "without size", "--source store://a.jsonl: the server does not say how large the file is"),
        ("a.parquet", "opened", "store://a.parquet: cannot be read: StoreError: gone"),
        ("a.jsonl", "opened", "store://a.jsonl: cannot be read: StoreError: gone"),
        ("a.jsonl", "read", "store://a.jsonl: cannot be read: StoreError: gone"),
        ("a.jsonl", "empty", "store://a.jsonl: cannot be read: the server has sent"),
        ("a.txt", "empty", "store://a.txt: cannot be read: the server has sent"),
        ("a.jsonl.gz", "empty", "store://a.jsonl.gz: cannot be read: the server has sent 0 bytes of 6"),
    ],
)
def test_failures_of_a_store_are_named(store, monkeypatch, name, fault, message):
    monkeypatch.setattr(store, "fault", fault)
    if name.endswith(".gz"):
        monkeypatch.setattr(store, "content", gzip.compress(store.content))
    with pytest.raises(DataError, match=f"^{message}"):
        count([f"store://{name}"])


def test_a_folder_that_may_not_be_read_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    """Its text would be missing from the dataset."""
    scandir, locked = os.scandir, tmp_path / "locked"
    locked.mkdir()
    (tmp_path / "a.txt").write_text("x")

    def refuse(path):
        if str(path) == str(locked):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=f"^--source {tmp_path}: cannot be listed: .*Permission denied: '{locked}'"):
        sources.list_files([str(tmp_path)])


def test_folders_that_match_a_glob_are_said_to_be_left_out(tmp_path, caplog):
    """Unless the pattern finds what is in them, too."""
    for name in ("a.txt", "more/b.txt", "more/deep/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert len(sources.list_files([f"{tmp_path}/*"])) == 1
    assert f"--source {tmp_path}/*: folders left out: 1, such as {tmp_path}/more" in caplog.text
    caplog.clear()
    assert len(sources.list_files([f"{tmp_path}/**"])) == 3
    assert not caplog.text


def test_missing_sources_are_named(tmp_path):
    for source in ("nothing.txt", "*.txt", "."):
        with pytest.raises(DataError, match="no files there; a folder is searched for"):
            sources.list_files([str(tmp_path / source)])
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "a.parquet")
    unit = sources.plan_units(sources.list_files([str(tmp_path / "a.parquet")]))[0]
    with pytest.raises(DataError, match=r"a\.parquet: no column 'text'; it has body; choose with --text-key"):
        list(sources.documents(unit, "text"))
    with pytest.raises(DataError, match=r"a\.parquet: no column 'q'; it has body; choose with --example-keys"):
        list(sources.documents(unit, ("body", "q")))


@pytest.mark.parametrize("keys", [(), ("text",)])
def test_two_columns_of_one_name_are_refused(tmp_path, keys):
    table = pa.table([pa.array(["a"]), pa.array(["b"]), pa.array(["c"])], names=["text", "text", "other"])
    pq.write_table(table, tmp_path / "a.parquet")
    (unit,) = sources.plan_units(sources.list_files([str(tmp_path / "a.parquet")]))
    with pytest.raises(DataError, match=r"a\.parquet: has 2 columns 'text'; rename all but one"):
        list(sources.documents(unit, keys or "text"))


def test_links_are_followed_and_never_left_out(tmp_path):
    """As in the Hugging Face cache, where every file of a snapshot is a link."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0123").write_text("hello")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "a.txt").symlink_to("../blobs/0123")
    (tmp_path / "snapshot" / "b.txt").write_text("b")
    names = [str(tmp_path / "snapshot" / name) for name in ("a.txt", "b.txt")]
    for source in ("snapshot", "snapshot/*"):
        found = sources.list_files([str(tmp_path / source)])
        assert [(file.url, file.size) for file in found] == list(zip(names, (5, 1), strict=True))
    (tmp_path / "snapshot" / "more").symlink_to("../blobs")
    with pytest.raises(DataError, match="more is a link to a folder, which is not followed: name each"):
        sources.list_files([str(tmp_path / "snapshot")])
    (tmp_path / "snapshot" / "more").unlink()
    (tmp_path / "snapshot" / "c.txt").symlink_to("../nowhere")
    with pytest.raises(DataError, match=r"No such file or directory: .*c\.txt"):
        sources.list_files([str(tmp_path / "snapshot")])


def test_a_file_in_several_sources_is_read_once_however_they_are_spelt(tmp_path, monkeypatch):
    """A link to it is a file of its own."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_text("a")
    (tmp_path / "real" / "b.txt").symlink_to("a.txt")
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "real")
    names = ["a.txt", "./", "../link", "../link/a.txt", "../l*/../real/*.txt", f"file://{tmp_path}/link/../real/a.txt"]
    found = sources.list_files([*names, f"local://{tmp_path}/real"])
    assert [file.url for file in found] == [f"{tmp_path}/real/{name}.txt" for name in "ab"]


@pytest.mark.parametrize("pattern", ["*/*.txt", "**/*.txt", "**", "*/deep/*.txt", "r?al/linked/*"])
def test_a_glob_that_would_pass_by_a_linked_folder_is_refused(tmp_path, pattern):
    """The shell enters it: its files would be left out without a word."""
    for name in ("elsewhere/deep/a.txt", "top/real/deep/b.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "top" / "real" / "c.txt").symlink_to("deep/b.txt")
    link = tmp_path / "top" / ("real/linked" if "linked" in pattern else "linked")
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=f"{link} is a link to a folder, which is not followed"):
        sources.list_files([f"{tmp_path}/top/{pattern}"])
    assert [file.size for file in sources.list_files([f"{link}/*/*.txt"])] == [1]
    link.unlink()
    sources.list_files([f"{tmp_path}/top/r*/*.txt"])


@pytest.mark.parametrize("name", ["File::Spec.txt", "file:x.txt", "[x].txt", "s3:x.txt", "memory::x.txt"])
def test_a_name_with_signs_of_a_url_or_glob_is_a_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(name)
    for source in (name, f"./{name}", str(tmp_path / name), "."):
        units = sources.plan_units(sources.list_files([source]))
        assert [text for unit in units for text in sources.documents(unit, "text")] == [name]


@pytest.mark.parametrize(("share", "units"), [(0.001, 10), (0.51, 2), (2, 1)])
def test_small_row_groups_share_units(tmp_path, monkeypatch, share, units):
    """A unit holds as many as `share` of the file is; a file that is smaller than a unit is not looked into."""
    texts = [f"text {i}" for i in range(40)]
    file = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": [*texts[:37], None, *texts[38:]], "id": range(40)}), file, row_group_size=4)
    monkeypatch.setattr(sources, "UNIT_BYTES", int(share * os.path.getsize(file)))
    monkeypatch.setattr(sources, "MOST_UNITS", 10**9)
    planned = sources.plan_units(sources.list_files([file]))
    assert len(planned) == units
    assert [row for unit in planned for row in range(unit.start, unit.stop)] == list(range(10 * (share < 1)))
    read = chain.from_iterable(sources.documents(unit, "text") for unit in planned)
    assert list(islice(read, 37)) == texts[:37]
    with pytest.raises(DataError, match=r"a\.parquet, row 37: 'text' is null"):
        next(read)


def test_the_tokenizer_is_learnt_from_all_kinds_of_a_few_large_units(monkeypatch):
    sampled = []
    monkeypatch.setattr(prepare_module, "_beginning", lambda unit, *_: sampled.append(unit) or iter(("text ",)))
    units = [sources.Unit((sources.File(name, 1 << 30),), bytes=1 << 30) for name in ("code", "math", "web")]
    prepare_module._trained_tokenizer(units, "text", 300)
    assert sampled == units


TO_BOTH = ["--shard-mb=0.0", "--block-mb=-1.0", "--block-mb=inf", "--validation-fraction=1.1"]
TO_BOTH += [
    "--validation-fraction=-0.1",
    "--validation-fraction=nan",
    "--output=s3://bucket/out",
    "--output=a-file/out",
    "--output=\udcfc",
    "--output=~/out",
    "--output=s3:/bucket/out",
    "--output=",
    "--source=",
]
TO_PREPARE = ["--max-characters=-5", "--processes=-1", "--vocab-size=256", "--eos-token=</s>"]
TO_PREPARE += ["--vocab-size=99999999999999", "--vocab-size=300 --tokenizer=T", "--text-key=body --format=chat"]


@pytest.mark.parametrize(
    ("command", "flags"),
    [*((convert_main, flags) for flags in TO_BOTH), *((main, flags) for flags in TO_BOTH + TO_PREPARE)],
)
def test_options_that_make_no_sense_are_refused(texts, tokenizer_folder, tmp_path, monkeypatch, command, flags, capsys):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", texts)
    np.arange(400, dtype="<u2").tofile("in.bin")
    Path("a-file").touch()
    words = ["--source=in.jsonl", "--output=out", "--processes=1"]
    if command is convert_main:
        words = ["--source=in.bin", "--output=out", "--format=nanogpt", f"--tokenizer={tokenizer_folder}"]
    files = set(tmp_path.iterdir())
    with pytest.raises(SystemExit) as refusal:
        command([*words, *flags.replace("=T", f"={tokenizer_folder}").split()])
    option, _, value = flags.split()[0].partition("=")
    assert f"error: {option} {value}: " in capsys.readouterr().err + str(refusal.value)
    assert set(tmp_path.iterdir()) == files


def test_the_standard_library_without_its_tests():
    files = [Path(file.url) for file in sources.list_files(["stdlib"])]
    assert len(files) > 400
    assert Path(json.__file__) in files
    assert not any({"test", "tests", "idle_test", "site-packages"} & set(file.parts) for file in files)


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
    assert (tokenizer.eos_token, tokenizer.bos_id) == (
        "<|end_of_text|>",
        tokenizer.raw.token_to_id("<|begin_of_text|>"),
    )
    for text in ["plain", "<|begin_of_text|>spelt out<|end_of_text|>", "", "<|end_of_text|>"]:
        (document,) = tokenizer.encode_documents([text])
        assert document[0] == tokenizer.bos_id
        assert document[-1] == tokenizer.eos_id
        assert document.count(tokenizer.bos_id) == document.count(tokenizer.eos_id) == 1
        assert tokenizer.decode(document) == text
        assert tokenizer.encode(text) == document[:-1]


def test_which_token_ends_a_document(texts, tmp_path):
    folder = llama3_like(texts, tmp_path, "$A")
    assert load_tokenizer(folder).eos_token == "<|end_of_text|>"
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    assert load_tokenizer(folder).eos_token == "<|endoftext|>"
    assert load_tokenizer(folder, "<|begin_of_text|>").eos_token == "<|begin_of_text|>"
    with pytest.raises(TitaniteError, match=r"has no token '<pad>'; its special tokens are .*<\|end_of_text\|>"):
        load_tokenizer(folder, "<pad>")


@pytest.mark.parametrize("command", [prepare, convert])
def test_the_token_that_is_asked_for_ends_the_documents(texts, tmp_path, command):
    folder = llama3_like(texts, tmp_path, "$A")
    source, options = write_jsonl(tmp_path / "in.jsonl", texts), {"processes": 1}
    if command is convert:
        np.array([5, 6], "<u2").tofile(source := tmp_path / "in.bin")
        options = {"format": "nanogpt"}
    options |= {"tokenizer": str(folder), "eos_token": "<|endoftext|>", "validation_fraction": 0}
    manifest = command([str(source)], str(tmp_path / "out"), **options)
    asked = load_tokenizer(folder).raw.token_to_id("<|endoftext|>")
    assert manifest["eos_id"] == asked
    assert {document[-1] for block in stored_blocks(tmp_path / "out") for document in block} == {asked}


def test_a_text_is_neither_cut_nor_padded_as_its_tokenizer_was_told(texts, tmp_path):
    """As in the tokenizer.json of many models for search."""
    raw = train_tokenizer(texts, 300).raw
    raw.enable_truncation(4)
    raw.enable_padding(length=9)
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    for text in ("a", texts[0] * 3):
        (document,) = tokenizer.encode_documents([text])
        assert document[:-1] == tokenizer.encode(text)
        assert tokenizer.decode(document) == text


def without_unknown(raw: RawTokenizer) -> RawTokenizer:
    raw.add_special_tokens([AddedToken("</s>", special=True)])
    return raw


def test_a_text_of_which_a_tokenizer_leaves_nothing_is_refused(tmp_path):
    tokenizer = Tokenizer(without_unknown(RawTokenizer(models.BPE({"</s>": 0, "a": 1, "b": 2}, []))), "</s>")
    tokenizer.save(tmp_path)
    options = {"tokenizer": str(tmp_path), "validation_fraction": 0, "processes": 1}
    source = str(write_jsonl(tmp_path / "in.jsonl", ["ab", "\n ", "b"]))
    prepare([source], str(tmp_path / "out"), **options)
    assert sorted(document for block in stored_blocks(tmp_path / "out") for document in block) == [
        [0],
        [1, 2, 0],
        [2, 0],
    ]
    write_jsonl(tmp_path / "in.jsonl", ["ab", "東京 é", "b"])
    with pytest.raises(DataError, match=r"the tokenizer has no tokens for a text, .*: 東京 é"):
        prepare([source], str(tmp_path / "out"), **options, overwrite=True)


def byte_level(texts, token: AddedToken, template: str = "$A") -> RawTokenizer:
    raw = train_tokenizer(texts, 300).raw
    raw.add_tokens([token])
    names = [name for name in template.split() if name != "$A"]
    raw.post_processor = TemplateProcessing(template, special_tokens=[(name, raw.token_to_id(name)) for name in names])
    return raw


@pytest.mark.parametrize("kind", ["not special", "Unigram", "WordLevel", "a", " ", "\n"])
def test_a_token_that_a_text_can_spell_out_does_not_end_documents(texts, kind):
    if kind == "not special":
        raw = byte_level(texts, AddedToken("</s>", special=False))
    elif kind == "Unigram":
        pieces = [("<unk>", 0.0), ("</s>", 0.0), *((letter, -5.0) for letter in "▁a</s>")]
        raw = without_unknown(RawTokenizer(models.Unigram(pieces, unk_id=0)))
    else:
        raw = without_unknown(RawTokenizer(models.WordLevel({"</s>": 0, "a": 1}, unk_token="a")))
        raw.pre_tokenizer = pre_tokenizers.Split("</s>", "isolated")
        if kind != "WordLevel":  # finds it only between two of these
            raw.normalizer, raw.pre_tokenizer = normalizers.Prepend("_"), pre_tokenizers.Split(kind, "isolated")
    with pytest.raises(TitaniteError, match=r"^mine: a text that spells out '</s>' would become that token"):
        Tokenizer(raw, "</s>", "mine")


def test_ids_with_gaps_between_them_are_all_below_the_size_of_the_vocabulary():
    raw = without_unknown(RawTokenizer(models.BPE({"</s>": 0, "a": 7}, [])))
    assert Tokenizer(raw, "</s>").vocab_size == 8


@pytest.mark.parametrize("model", [models.WordLevel({"</s>": 0, "A": 1}), models.BPE({"</s>": 0, "A": 1}, [])])
def test_a_vocabulary_without_letters_is_refused(model):
    with pytest.raises(TitaniteError, match=r"^mine: cannot encode the letter a: "):
        Tokenizer(without_unknown(RawTokenizer(model)), "</s>", "mine")


@pytest.mark.parametrize(("template", "bos"), [("</s> $A", []), ("</s> <|endoftext|> $A </s>", ["<|endoftext|>"])])
def test_an_eos_that_the_template_puts_before_a_text_is_left_out(texts, template, bos):
    """OPT's and GPT-2's bos is their eos."""
    raw = byte_level(texts, AddedToken("</s>", special=True), template)
    tokenizer = Tokenizer(raw, "</s>")
    assert [raw.id_to_token(token) for token in tokenizer.prefix] == bos
    (document,) = tokenizer.encode_documents(["text"])
    assert document.count(tokenizer.eos_id) == 1
    assert document[-1] == tokenizer.eos_id


def test_saving_keeps_the_fingerprint_and_the_encoding(texts, tmp_path):
    original = load_tokenizer(llama3_like(texts, tmp_path, "<|begin_of_text|> $A"))
    (tmp_path / "copy").mkdir()
    original.save(tmp_path / "copy")
    copy = load_tokenizer(tmp_path / "copy")
    assert copy.fingerprint == original.fingerprint
    assert copy.encode_documents(texts[:20]) == original.encode_documents(texts[:20])
    assert Tokenizer(copy.raw, "<|endoftext|>").fingerprint != original.fingerprint


def test_a_saved_tokenizer_has_no_template_but_its_own(tokenizer_folder, tmp_path):
    tokenizer = load_tokenizer(tokenizer_folder)
    for template in ("{{ messages }}", ""):  # as of a chat dataset, and of plain text that takes its place
        tokenizer.chat_template = template
        tokenizer.save(tmp_path)
        assert load_tokenizer(tmp_path).chat_template == template


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ("one", "one"),
        ([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}], "plain"),
        ([{"name": "tool_use", "template": "tools"}], ""),
        (None, ""),
    ],
)
def test_which_template_a_tokenizer_has(tokenizer_folder, tmp_path, declared, expected):
    """A file of its own goes first, as in transformers."""
    folder = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": None, "chat_template": declared}))
    assert load_tokenizer(folder).chat_template == expected
    (folder / "chat_template.jinja").write_text("file")
    assert load_tokenizer(folder).chat_template == "file"


# ---------------------------------------------------------------- other projects' tokens


def old_documents(tokenizer: Tokenizer, texts) -> list[list[int]]:
    return [tokenizer.encode(text) for text in texts]


def write_nanogpt(folder, documents, eos):
    np.array([token for document in documents for token in [*document, eos]], "<u2").tofile(folder / "a.bin")


def write_megatron(folder, documents, eos, code=4, dtype="<i4"):
    """By the layout in Megatron-LM's indexed_dataset.py; every second document in two sequences."""
    sequences, bounds = [], [0]
    for i, document in enumerate(documents):
        parts = [document[:1], [*document[1:], eos]] if i % 2 else [[*document, eos, eos]]
        sequences += parts
        bounds.append(len(sequences))
    np.array([token for sequence in sequences for token in sequence], dtype).tofile(folder / "a.bin")
    sizes = np.array([len(sequence) for sequence in sequences], "<i4")
    pointers = (np.cumsum([0, *sizes[:-1]]) * np.dtype(dtype).itemsize).astype("<i8")
    counts = np.array([len(sequences), len(bounds)], "<u8").tobytes()
    head = b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + bytes([code]) + counts
    (folder / "a.idx").write_bytes(head + sizes.tobytes() + pointers.tobytes() + np.array(bounds, "<i8").tobytes())


def set_bounds(index, *bounds):
    """The last numbers of a Megatron index: which sequence each document begins with."""
    content = index.read_bytes()
    index.write_bytes(content[: -8 * len(bounds)] + np.array(bounds, "<i8").tobytes())


def set_byte(index, at, value):
    content = bytearray(index.read_bytes())
    content[at] = value
    index.write_bytes(content)


def set_sequence(index, sequence, size, pointer):
    """One of the three sequences of a Megatron index: its tokens, and the byte it begins at."""
    content = bytearray(index.read_bytes())
    content[34 + 4 * sequence : 38 + 4 * sequence] = np.array(size, "<i4").tobytes()
    content[46 + 8 * sequence : 54 + 8 * sequence] = np.array(pointer, "<i8").tobytes()
    index.write_bytes(content)


def write_fms(folder, documents, eos):
    schema = pa.schema([("tokens", pa.uint32())])
    with pa.OSFile(str(folder / "a.bin"), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for document in documents:
            writer.write_batch(pa.record_batch([pa.array(document, pa.uint32())], schema=schema))


@pytest.mark.parametrize(
    ("name", "write"), [("nanogpt", write_nanogpt), ("megatron", write_megatron), ("fms", write_fms)]
)
def test_other_formats_are_converted_with_one_eos_each(texts, tokenizer_folder, tmp_path, name, write):
    tokenizer = load_tokenizer(tokenizer_folder)
    documents = old_documents(tokenizer, texts)
    write(tmp_path, documents, tokenizer.eos_id)
    output = tmp_path / "out"
    options = {"validation_fraction": 0.1, "shard_mb": 0.01}
    manifest = convert([str(tmp_path / "a.bin")], str(output), name, str(tokenizer_folder), **options)
    train, held_out = decoded(output, "train"), decoded(output, "validation")
    assert Counter(train + held_out) == Counter(texts)
    assert 15 < len(held_out) < 75
    sizes = [shard["tokens"] * 2 / 2**20 for shard in manifest["shards"] if shard["split"] == "train"]
    assert len(sizes) > 1
    assert all(0.01 <= size < 0.012 for size in sizes[:-1])
    verify.main([str(output)])


@pytest.mark.parametrize(
    ("name", "write"), [("nanogpt", write_nanogpt), ("megatron", write_megatron), ("fms", write_fms)]
)
def test_an_eos_ends_a_document_wherever_it_stands(tokenizer_folder, tmp_path, name, write):
    eos = load_tokenizer(tokenizer_folder).eos_id
    write(tmp_path, [[eos, 5, 6], [7, eos, 8, eos], [eos], [9]], eos)
    output = tmp_path / "out"
    convert([str(tmp_path / "a.bin")], str(output), name, str(tokenizer_folder), validation_fraction=0)
    stored = [document for block in stored_blocks(output) for document in block]
    assert stored == [[5, 6, eos], [7, eos], [8, eos], [9, eos]]
    verify.main([str(output)])


@pytest.mark.parametrize("source", ["a", "a.idx", "*"])
def test_megatron_files_are_known_by_their_prefix(tokenizer_folder, tmp_path, source):
    eos = load_tokenizer(tokenizer_folder).eos_id
    write_megatron(tmp_path, [[5, 6], [7]], eos)
    source, output = str(tmp_path / source), str(tmp_path / "out")
    convert([source], output, "megatron", str(tokenizer_folder), validation_fraction=0)
    assert [document for block in stored_blocks(tmp_path / "out") for document in block] == [[5, 6, eos], [7, eos]]


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_megatron_files_of_every_type_of_integer_and_with_an_empty_document(tokenizer_folder, tmp_path, code, dtype):
    eos = load_tokenizer(tokenizer_folder).eos_id
    write_megatron(tmp_path, [[5, 6], [7]], eos, code, dtype)
    set_bounds(tmp_path / "a.idx", 0, 0, 3)
    output = tmp_path / "out"
    convert([str(tmp_path / "a.bin")], str(output), "megatron", str(tokenizer_folder), validation_fraction=0)
    assert [document for block in stored_blocks(output) for document in block] == [[5, 6, eos], [7, eos]]
    found = convert_module.megatron_documents(tmp_path / "a.bin", eos)
    assert {type(ids) for ids in found} == {np.ndarray}  # not np.memmap, which is slow to cut


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
def test_documents_of_nanogpt_are_found_piece_by_piece_and_the_last_needs_no_end(tmp_path, monkeypatch, at_once):
    np.array([5, 6, 0, 7, 0, 0, 8, 9], "<u2").tofile(tmp_path / "a.bin")
    monkeypatch.setattr(convert_module, "IDS_AT_ONCE", at_once)
    found = [ids.tolist() for ids in convert_module.nanogpt_documents(tmp_path / "a.bin", 0)]
    assert found == [[5, 6, 0], [7, 0], [0], [8, 9]]


def test_tokens_that_are_not_there_are_no_text(tokenizer_folder, tmp_path):
    write_nanogpt(tmp_path, [[]], 0)
    with pytest.raises(DataError, match=r"--source .*a\.bin: holds no documents"):
        convert([str(tmp_path / "a.bin")], str(tmp_path / "out"), "nanogpt", str(tokenizer_folder))
    with pytest.raises(DataError, match=r"--source .*x\.bin: no files there; name files of tokens, or globs of them$"):
        convert([str(tmp_path / "x")], str(tmp_path / "out"), "megatron", str(tokenizer_folder))


@pytest.mark.parametrize("token", [400, 5000, -3])
def test_tokens_of_another_vocabulary_are_refused(tokenizer_folder, tmp_path, token):
    write_megatron(tmp_path, [[1, 2], [token, 3]], 0)
    with pytest.raises(
        DataError, match=rf"a\.bin, document 1: token id {token} is not in the tokenizer's vocabulary of 400"
    ):
        convert([str(tmp_path / "a.bin")], str(tmp_path / "out"), "megatron", str(tokenizer_folder))


def test_nothing_is_converted_into_a_folder_that_is_written_to(tokenizer_folder, tmp_path, monkeypatch):
    write_nanogpt(tmp_path, [[5, 6]], 0)
    monkeypatch.setattr("data.workers.LOCK_SECONDS", 0)
    with locked(tmp_path / "out"), pytest.raises(DataError, match="/out: another process is writing there"):
        convert([str(tmp_path / "a.bin")], str(tmp_path / "out"), "nanogpt", str(tokenizer_folder))


def test_tokens_that_are_no_integers_are_refused(tokenizer_folder, tmp_path):
    """Fractions would be cut off."""
    schema = pa.schema([("tokens", pa.float32())])
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), schema) as file:
        file.write_batch(pa.record_batch([pa.array([5.0, 6.7], pa.float32())], schema))
    with pytest.raises(DataError, match=r"a\.arrow, document 0: token ids are of type float32, must be integers"):
        convert([str(tmp_path / "a.arrow")], str(tmp_path / "out"), "fms", str(tokenizer_folder))


def test_rows_of_lists_are_documents_and_nulls_are_refused(tokenizer_folder, tmp_path):
    eos, schema = load_tokenizer(tokenizer_folder).eos_id, pa.schema([("tokens", pa.list_(pa.uint32()))])
    for rows in ([[5, 6], [], [7]], [[5], None], [[5, None]]):
        with pa.ipc.new_file(str(tmp_path / "a.arrow"), schema) as file:
            file.write_batch(pa.record_batch([pa.array([[8, 9]], schema.types[0])], schema))
            file.write_batch(pa.record_batch([pa.array(rows, schema.types[0])], schema))
        given = [str(tmp_path / "a.arrow")], str(tmp_path / "out"), "fms", str(tokenizer_folder)
        if None in rows or None in rows[0]:
            with pytest.raises(DataError, match=r"a\.arrow, record batch 1: holds a null"):
                convert(*given, overwrite=True)
        else:
            convert(*given, validation_fraction=0)
            stored = [document for block in stored_blocks(tmp_path / "out") for document in block]
            assert stored == [[8, 9, eos], [5, 6, eos], [7, eos]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data, index: index.unlink(), r"a\.bin: its index .*a\.idx is missing"),
        (lambda data, index: index.write_bytes(b"x" * 50), r"a\.idx: not a Megatron index"),
        (lambda data, index: set_byte(index, 9, 2), r"a\.idx: version 2, type 4; must be version 1 with integers"),
        (lambda data, index: set_byte(index, 17, 6), r"a\.idx: version 1, type 6; must be version 1 with integers"),
        (lambda data, index: index.write_bytes(index.read_bytes()[:-8]), r"a\.idx: is cut short"),
        (lambda data, index: data.write_bytes(data.read_bytes()[:-4]), r"a\.bin: is cut short, or .*a\.idx belongs to"),
        (lambda data, index: data.write_bytes(b""), r"a\.bin: is cut short"),
        (
            lambda data, index: data.write_bytes(data.read_bytes() + b"\1\0\0\0"),
            "tokens it lists end at byte 32 of 36",
        ),
        (lambda data, index: set_bounds(index, 1, 1, 3), r"a\.idx: its 3 document bounds do not fit its 3 seq"),
        (lambda data, index: set_bounds(index, 0, 1, 2), r"a\.idx: its 3 document bounds do not fit its 3 seq"),
        (lambda data, index: set_bounds(index, 0, 1, 9), r"a\.idx: its 3 document bounds do not fit its 3 seq"),
        (lambda data, index: set_bounds(index, 0, 4, 3), r"a\.idx: its 3 document bounds do not fit its 3 seq"),
        *(
            (
                lambda data, index, change=change: set_sequence(index, *change),
                rf"a\.idx: sequence {place} from byte {at}",
            )
            for change, place, at in [
                ((1, 1, 20), "1, of 1 tokens", 20),  # a token is left out
                ((1, 1, 12), "1, of 1 tokens", 12),  # one comes twice
                ((1, 0, 16), "2, of 3 tokens", 20),
                ((1, -1, 16), "1, of -1 tokens", 16),
                ((1, 1, -16), "1, of 1 tokens", -16),
            ]
        ),
    ],
)
def test_damaged_megatron_files_are_named(tokenizer_folder, tmp_path, change, message):
    write_megatron(tmp_path, [[5, 6], [7, 8, 9]], 0)
    change(tmp_path / "a.bin", tmp_path / "a.idx")
    with pytest.raises(DataError, match=message):
        convert([str(tmp_path / "a.bin")], str(tmp_path / "out"), "megatron", str(tokenizer_folder))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_key": "body"}, "nothing under 'body'"),
        ({"format": "sft", "seq_len": 8}, "nothing under 'prompt'"),
        ({"format": "sft", "seq_len": 2, "example_keys": "text,text"}, "longer than --seq-len 2"),
        ({"format": "chat", "seq_len": 8, "example_keys": "text"}, "must be a list of messages"),
        ({"sources": "empty.txt"}, "the input holds no text: nothing to prepare"),
    ],
)
def test_a_mistyped_option_leaves_the_dataset_that_it_was_to_replace(tokenizer_folder, tmp_path, options, message):
    source, empty = write_jsonl(tmp_path / "in.jsonl", ["some text"] * 99), tmp_path / "empty.txt"
    empty.touch()
    given = {"tokenizer": str(tokenizer_folder), "processes": 1, "validation_fraction": 0}
    prepare([str(source)], str(tmp_path / "out"), **given)
    before = contents(tmp_path / "out")
    sources_given = [str(empty if options.pop("sources", "") else source)]
    with pytest.raises(TitaniteError, match=message):
        prepare(sources_given, str(tmp_path / "out"), **given, **options, overwrite=True)
    assert contents(tmp_path / "out") == before


def test_of_a_long_first_document_a_part_tells_as_much(tokenizer_folder, tmp_path, monkeypatch):
    source, encoded = write_jsonl(tmp_path / "in.jsonl", ["some text " * 9999]), []
    tokenize = prepare_module._tokenize

    def watch(plan, tokenizer, batch, words):
        encoded.append(len(batch[0].text))
        return tokenize(plan, tokenizer, batch, words)

    monkeypatch.setattr(prepare_module, "_tokenize", watch)
    prepare([str(source)], str(tmp_path / "out"), str(tokenizer_folder), processes=1, validation_fraction=0)
    assert encoded == [1000, 99990]


def test_tokens_of_another_kind_leave_the_dataset_that_they_were_to_replace(tokenizer_folder, tmp_path):
    """Found in the first document of any file; later it leaves no dataset."""
    for name, tokens in (("a", [1, 0]), ("b", [5000, 0]), ("c", [0])):
        np.array(tokens, "<u2").tofile(tmp_path / f"{name}.bin")
    out, (good, bad, empty) = str(tmp_path / "out"), (str(tmp_path / f"{name}.bin") for name in "abc")
    convert([good], out, "nanogpt", str(tokenizer_folder), validation_fraction=0)
    before = contents(tmp_path / "out")
    with pytest.raises(DataError, match=r"b\.bin, document 0: token id 5000"):
        convert([good, bad], out, "nanogpt", str(tokenizer_folder), validation_fraction=0, overwrite=True)
    with pytest.raises(DataError, match=r"c\.bin: holds no documents"):
        convert([empty], out, "nanogpt", str(tokenizer_folder), validation_fraction=0, overwrite=True)
    assert contents(tmp_path / "out") == before
    np.array([1, 0, 5000, 0], "<u2").tofile(good)
    with pytest.raises(DataError, match=r"a\.bin, document 1: token id 5000"):
        convert([good], out, "nanogpt", str(tokenizer_folder), validation_fraction=0, overwrite=True)
    assert not (tmp_path / "out" / "manifest.json").exists()  # its shards are gone


def test_files_to_convert_are_local(tokenizer_folder, tmp_path):
    with pytest.raises(DataError, match=r"--source s3://bucket/a\.bin: must be on this machine"):
        convert(["s3://bucket/a.bin"], str(tmp_path / "out"), "nanogpt", str(tokenizer_folder))


@pytest.mark.parametrize("source", ["FOLDER", "stdlib"])
def test_text_is_not_taken_for_tokens(tokenizer_folder, tmp_path, source):
    """As the readme beside the tokens, which is text, would be where a folder is named."""
    np.array([1, 2, 0], "<u2").tofile(tmp_path / "a.bin")
    (tmp_path / "readme.md").write_text("\x01\0" * 20)
    source = source.replace("FOLDER", str(tmp_path))
    with pytest.raises(
        DataError, match=rf"--source {source}: must be files of tokens; name them, as in 'FOLDER/\*\.bin'"
    ):
        convert([source], str(tmp_path / "out"), "nanogpt", str(tokenizer_folder))
    assert not (tmp_path / "out").exists()


def test_a_source_that_may_not_be_read_is_named(tokenizer_folder, tmp_path, monkeypatch):
    np.array([1, 2, 0], "<u2").tofile(tmp_path / "a.bin")
    monkeypatch.setattr(np, "memmap", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    words = [f"--source={tmp_path / 'a.bin'}", f"--output={tmp_path / 'out'}", f"--tokenizer={tokenizer_folder}"]
    with pytest.raises(SystemExit, match=rf"error: {tmp_path}/a\.bin: cannot be read: .*Permission denied"):
        convert_main([*words, "--format=nanogpt"])


@pytest.mark.parametrize("command", [main, lambda words: convert_main([*words, "--format=nanogpt"])])
@pytest.mark.parametrize("closed", ["tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json", "tokenizer"])
def test_a_tokenizer_that_may_not_be_read_is_named(tokenizer_folder, tmp_path, monkeypatch, command, closed):
    np.array([1, 2, 0], "<u2").tofile(tmp_path / "a.bin")
    shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    closed, call = tmp_path / closed, os.stat if closed == "tokenizer" else open
    name, module = call.__name__, "os" if call is os.stat else "io"

    def refuse(file, *rest, **options):
        if Path(str(file)).is_relative_to(closed):
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return call(file, *rest, **options)

    monkeypatch.setattr(f"{module}.{name}", refuse)
    words = [f"--source={tmp_path / 'a.bin'}", f"--output={tmp_path / 'out'}"]
    with pytest.raises(SystemExit, match=rf"^error: {closed}.*: cannot be read: Permission denied"):
        command([*words, f"--tokenizer={tmp_path / 'tokenizer' / 'tokenizer.json'}"])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer_config.json", b"{", r"tokenizer_config\.json: not a JSON object"),
        ("tokenizer_config.json", b"[]", r"tokenizer_config\.json: not a JSON object"),
        (
            "tokenizer_config.json",
            b'{"eos_token": 5}',
            "tokenizer_config.json: eos_token = 5: must be the token's text",
        ),
        ("tokenizer_config.json", b'{"eos_token": {"id": 5}}', r"tokenizer_config\.json: eos_token = .*\"id\": 5"),
        ("tokenizer_config.json", b'{"chat_template": [5]}', "not a valid chat template"),
        ("chat_template.jinja", b"\xff", "not a valid chat template: .*utf-8"),
    ],
)
@pytest.mark.parametrize("eos_token", ["", "<|endoftext|>"])
def test_damaged_files_beside_a_tokenizer_are_named(tokenizer_folder, tmp_path, file, content, message, eos_token):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    (folder / file).write_bytes(content)
    if eos_token and b"eos" in content:  # which is then not asked for
        assert load_tokenizer(folder, eos_token).eos_token == eos_token
        return
    with pytest.raises(TitaniteError, match=message):
        load_tokenizer(folder, eos_token)


def test_a_shard_of_more_tokens_than_arrow_counts_is_refused(tmp_path):
    document = np.broadcast_to(np.uint16(5), 2**30)  # no memory behind it
    with pytest.raises(DataError, match=r"shard 0 would hold 2,147,483,648 tokens, .* smaller --shard-mb"):
        convert_module._write(tmp_path, "train", 0, [document] * 2, 2**20)


def test_every_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced, named, fsync, replace = [], [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    monkeypatch.setattr(Path, "replace", lambda self, name: (named.append(str(self)), replace(self, name)))
    write_dataset(tmp_path / "set", [[[1, 2, 0]]], validation=[[5, 0]])
    assert len(named) == 8
    assert synced == named
    names = [Path(name).name for name in named]  # a kill leaves no tokenizer without its eos, and no dataset half
    assert names.index(".tokenizer_config.json.tmp") < names.index(".tokenizer.json.tmp")
    assert names[-2:] == [".blocks.arrow.tmp", ".manifest.json.tmp"]


def test_long_texts_are_cut_at_line_ends_and_nothing_is_lost() -> None:
    text = "".join(f"line {i} {'x' * (i % 37)}\n" for i in range(500)) + "y" * 3000
    cut = list(sources.pieces(text, 1000))
    assert "".join(cut) == text
    assert all(len(piece) <= 1000 for piece in cut)
    assert all(piece.endswith("\n") for piece in cut if "line" in piece and piece is not cut[-1])
    assert sum(len(piece) < 900 for piece in cut) <= 2
    assert list(sources.pieces(text, 0)) == [text]
    assert list(sources.pieces("", 10)) == [""]


def test_a_loader_that_fails_in_the_benchmark_loses_no_row_of_the_others(tmp_path, monkeypatch):
    def measured(row):
        rate = {"note": "failed"} if row[0] == "streaming" else {"Mtok/s": 60.0 if row[0] == "titanite" else 10.0}
        return {"loader": row[0], "Mtok/s/cpu": 1, "state_bytes": 1, "resume_ms": 1, **rate}

    for name, stub in (("corpus", lambda *_, **__: ([], [])), ("write_ours", Mock()), ("write_peer", lambda *_: "")):
        monkeypatch.setattr(data_benchmark, name, stub)
    monkeypatch.setattr(data_benchmark, "in_own_process", measured)
    rows, bars = data_benchmark.loaders(tmp_path, quick=True)
    assert len(rows) == 4 + sum(len(peer.workers) for peer in data_benchmark.PEERS.values())
    assert bars[-1] == ("loaders: 5 times MosaicML streaming at its best", True)


@pytest.mark.parametrize(("number", "said"), [(errno.ENOSYS, "without locks"), (errno.EBADF, "cannot be locked")])
def test_file_systems_without_locks(number, said, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(number, os.strerror(number))))
    refused = number == errno.EBADF
    with pytest.raises(DataError, match=said) if refused else nullcontext(), locked(tmp_path / "out"):
        assert said in caplog.text


def test_an_error_ends_the_workers_without_the_tasks_that_wait(tmp_path):
    with locked(tmp_path) as lock, suppress(DataError), worker_pool(2, lock) as pool:
        tasks = [pool.submit(os.getpid) for _ in range(50)]
        raise DataError("a damaged file")
    assert tasks[-1].cancelled()


def test_the_lock_is_no_program_in_a_folder_that_may_be_new(tmp_path):
    with locked(tmp_path / "datasets" / "out"):
        assert not (tmp_path / "datasets" / "out" / ".lock").stat().st_mode & 0o111


@pytest.mark.parametrize(
    ("url", "factor"),
    [
        ("a.parquet", 5),
        ("https://host/a.parquet?download=true", 5),
        ("https://host/a.JSONL.GZ#part", 5),
        ("a.txt.zst", 5),
        ("https://host/a.jsonl?format=.gz", 1),
        ("a.md", 1),
    ],
)
def test_the_estimate_knows_what_is_compressed(url, factor):
    assert sources.text_bytes(sources.File(url, 1000)) == 1000 * factor

"""From text to a dataset: every source, exact, the same bytes whatever happens on the way."""

import bz2
import codecs
import csv
import errno
import gzip
import io
import json
import lzma
import os
import random
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from config import load_config
from data.prepare import main, passes, readers, sources, workers
from data.prepare import prepare as prepare_texts
from data.prepare.output import BAD_RECORDS, Output
from data.prepare.tokens import token_documents
from data.shards import DataError
from data.tokenizer import load_tokenizer, train_tokenizer
from storage import LocalStore
from tests.corpus import documents_in, prepare, stored_blocks, word_tokenizer
from tools import verify

ROOT = Path(__file__).parents[2]
SEPARATOR = "\n=====\n"
WORDS = ["the", "quick", "naïve", "日本語", "def f(x):\n    return x\n", "🙂", "<|endoftext|>", "  ", "\r\n"]
STOP = pytest.raises(KeyboardInterrupt)


@pytest.fixture(scope="module")
def texts():
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 60))) + f" {i}" for i in range(400)]


@pytest.fixture(scope="module")
def tokenizer_folder(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(texts, 400).save(folder)
    return folder


@pytest.fixture
def make(tokenizer_folder, tmp_path):
    """Prepares sources in this process, and returns the dataset's folder."""

    def make(*given, output="out", **options):
        defaults = {"tokenizer": str(tokenizer_folder), "processes": 1}
        prepare([str(source) for source in given], str(tmp_path / output), **defaults | options)
        return tmp_path / output

    return make


@pytest.fixture
def lines(texts, tmp_path):
    """The texts as JSON lines."""
    return write_jsonl(tmp_path / "in.jsonl", texts)


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    return path


def decoded(folder, split):
    """The documents of a split, each checked to end with its only eos."""
    tokenizer = load_tokenizer(folder)
    documents = list(chain.from_iterable(stored_blocks(folder, split)))
    assert all(document.index(tokenizer.eos_id) == len(document) - 1 for document in documents)
    return [tokenizer.decode(document) for document in documents]


def documents_of(folder):
    return Counter(decoded(folder, "train") + decoded(folder, "validation"))


def contents(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}


def start_script(path, code, *arguments):
    """Start data.prepare with small units and these arguments, after `code`, in a process of its own."""
    begin = "import os, signal; from pathlib import Path; from data.prepare import main, passes, readers\n"
    begin += "readers.UNIT_BYTES = 20_000\n"
    end = f"if __name__ == '__main__':\n    main({[str(argument) for argument in arguments]!r})\n"
    path.write_text(begin + code + end)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, str(path)], env=environment, stderr=subprocess.PIPE, text=True)


COMPRESS = {
    ".zst": lambda content: pa.compress(content, codec="zstd", asbytes=True),
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def write_table(file, rows_at_once=3, **columns):
    """An Arrow file, or Parquet by its name."""
    writer_of = pq.ParquetWriter if file.suffix == ".parquet" else pa.ipc.new_file
    table = pa.table(columns)
    with writer_of(file, table.schema) as stream:
        for first in range(0, len(table), rows_at_once):
            stream.write_table(table.slice(first, rows_at_once))
    return file


@pytest.fixture
def inputs(texts, tmp_path):
    """The same documents in every kind of source."""
    folder = tmp_path / "in"
    (folder / "files").mkdir(parents=True)
    for i, text in enumerate(texts):
        (folder / "files" / f"{i:04}.md").write_bytes(text.encode())
    content = codecs.BOM_UTF8 + write_jsonl(folder / "a.jsonl", texts).read_bytes()
    (folder / "a.jsonl").write_bytes(content)
    for suffix, compress in COMPRESS.items():
        (folder / f"a.jsonl{suffix}").write_bytes(compress(content[:5]) + compress(content[5:]))
    with (folder / "a.jsonl.gz").open("ab") as file:
        file.write(bytes(1000))  # which are no content
    records = [{"text": text, "more": [{}]} for text in texts]
    (folder / "a.json").write_text("\ufeff \n" + json.dumps(records, indent=2, ensure_ascii=False))
    for name in ("a.arrow", "a.parquet"):
        write_table(folder / name, 64, n=range(len(texts)), text=texts)
    write_table(folder / "binary.parquet", 64, text=[text.encode() for text in texts])
    table = io.StringIO(newline="")
    csv.writer(table, "excel-tab").writerows([["n", "text"], *enumerate(texts)])
    (folder / "a.tsv").write_bytes(table.getvalue().encode("utf-8-sig"))
    (folder / "one.txt").write_bytes(b"\xef\xbb\xbf" + SEPARATOR.join(texts).encode())
    return folder


KINDS = [*(f"a.jsonl{suffix}" for suffix in ("", *COMPRESS)), "a.json", "a.arrow", "a.parquet", "binary.parquet"]


@pytest.mark.parametrize("source", [*KINDS, "a.tsv", "files", "one.txt", "Python"])
def test_every_source_gives_each_document_once(inputs, texts, make, tmp_path, monkeypatch, source):
    monkeypatch.setattr(readers, "UNIT_BYTES", 3000)  # many units, cut in the middle of lines
    options = {"validation_fraction": 0.1}
    output = tmp_path / "out"
    if source == "one.txt":
        options["separator"] = SEPARATOR.replace("\n", "\\n")
    if source == "Python":
        prepare_texts(iter(texts), str(output), processes=1, **options)
    else:
        make(inputs / source, **options)
    assert documents_of(output) == Counter(texts)
    assert 15 < len(decoded(output, "validation")) < 75
    numbers = [int(text.rpartition(" ")[2]) for text in decoded(output, "train")]  # in the order of the input
    steps = np.diff(numbers)  # shuffled, and not file by file: of either sign alike, and few small ones
    assert abs(np.sign(steps).mean()) < 0.2 < np.mean(np.abs(steps) > 40)
    assert not [file for file in output.glob(".*") if file.name != ".lock"]
    verify.main([str(output)])


def test_the_held_out_documents_depend_on_their_text_alone(texts, make, tmp_path):
    """Whatever the order, how often a text comes, and into how many pieces it is cut."""

    def held_out(order, **options):
        file = write_jsonl(tmp_path / "in.jsonl", order)
        folder = make(file, output=f"{len(order)}{len(options)}", validation_fraction=0.2, **options)
        return decoded(folder, "validation"), decoded(folder, "train")

    whole, _ = held_out(texts)
    repeated, trained = held_out(texts[::-1] + texts[:50])
    assert {*whole} == {*repeated}
    assert not {*repeated} & {*trained}
    pieces, _ = held_out(texts, max_characters=40)
    assert Counter(pieces) == Counter(piece for text in whole for piece in passes.cut(text, 40))
    assert len(pieces) > len(whole) > 40


def test_long_texts_are_cut_at_line_ends_and_nothing_is_lost():
    assert list(passes.cut("ab\ncd\nefghijk\n", 5)) == ["ab\n", "cd\n", "efghi", "jk\n"]


def test_the_same_bytes_by_any_number_of_processes_and_parts(texts, make, tmp_path, monkeypatch):
    """Also where there are more tasks than a pool is given at once."""
    file = write_jsonl(tmp_path / "in.jsonl", texts * 3)
    monkeypatch.setattr(readers, "UNIT_BYTES", 30_000)
    monkeypatch.setattr(workers, "AT_ONCE", 2)
    sizes = {"shard_mb": 0.01, "block_mb": 0.004, "validation_fraction": 0.1}
    whole, shared = (contents(make(file, output=f"{n}", processes=n, **sizes)) for n in (1, 3))
    monkeypatch.setattr(passes, "HELD_BYTES", 1)  # each unit in several parts
    monkeypatch.setattr(passes, "BATCH_BYTES", 5000)
    assert whole == shared == contents(make(file, **sizes))
    assert "train-00001.arrow" in whole


@pytest.mark.parametrize(
    ("separator", "content", "documents"),
    [
        ("\n---\n", b"one\r\n---\r\ntwo\n---\r\nthree\r", ["one", "two", "three\r"]),
        ("\r\n---\r\n", b"one\n---\ntwo\r\n---\r\nthree", ["one", "two", "three"]),
        ("---", b"\xef\xbb\xbf---one---\xef\xbb\xbftwo---", ["one", "\ufefftwo"]),  # a mark begins a file only
    ],
)
def test_separators_divide_texts_and_their_line_ends_match_lf_and_crlf(tmp_path, separator, content, documents):
    (tmp_path / "a.txt").write_bytes(content)
    assert documents_in(tmp_path / "a.txt", separator=separator) == documents


def test_lines_belong_to_one_unit_wherever_it_begins(texts, tmp_path, monkeypatch):
    file = write_jsonl(tmp_path / "a.jsonl", texts[:20])
    for unit_bytes in range(1, 60):
        monkeypatch.setattr(readers, "UNIT_BYTES", unit_bytes)
        assert documents_in(file) == texts[:20]


def test_a_suffix_without_code_that_reads_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "KINDS", sources.KINDS | {".tale": "tale"})
    (tmp_path / "a.tale").write_text("once")
    with pytest.raises(DataError, match=r"a\.tale: KINDS has 'tale', which no branch of _records"):
        documents_in(tmp_path / "a.tale")


# ---------------------------------------------------------------- kills


@pytest.mark.parametrize("changed", ["file", "tokenizer", "option"])
def test_parts_that_another_input_made_are_not_used(texts, lines, make, tmp_path, monkeypatch, changed):
    """A file of the same size, say, with lines in another order: some would come twice and others never."""
    monkeypatch.setattr(readers, "UNIT_BYTES", 10_000)
    with patch("data.prepare.passes._write_bucket", side_effect=KeyboardInterrupt), STOP:
        make(lines)
    options = {}
    if changed == "file":
        write_jsonl(lines, texts[::-1])
    elif changed == "tokenizer":
        train_tokenizer(texts, 300).save(tmp_path)
        options["tokenizer"] = str(tmp_path)
    else:
        options["max_characters"] = 40
    assert contents(make(lines, **options)) == contents(make(lines, **options, output="whole"))


# After the third file of some name has its name, the process kills itself: no race with one that watches it.
KILL = (
    "real, seen = Path.replace, []\n"
    "def replace(path, target):\n"
    "    real(path, target)\n"
    "    seen.extend([target] * target.name.startswith('%s'))\n"
    "    if len(seen) == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
    "Path.replace = replace\n"
)


@pytest.mark.parametrize("progress", ["unit-", "bucket-"])
def test_after_sigkill_the_same_command_finishes_with_the_same_bytes(
    lines, make, tokenizer_folder, tmp_path, monkeypatch, progress
):
    monkeypatch.setattr(readers, "UNIT_BYTES", 20_000)
    whole = contents(make(lines, shard_mb=0.02, output="whole"))
    output = tmp_path / "killed"
    words = [f"--source={lines}", f"--output={output}", "--processes=1", "--shard-mb=0.02"]
    killed = start_script(tmp_path / "killed.py", KILL % progress, *words, f"--tokenizer={tokenizer_folder}")
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    done = {path.name for path in output.glob(f".parts/{progress}*")}
    assert len(done) == 3
    with patch.object(Path, "replace", autospec=True, side_effect=Path.replace) as replace:
        assert contents(make(lines, shard_mb=0.02, output="killed")) == whole
    assert not done & {call.args[1].name for call in replace.mock_calls}, "finished parts are not made again"


@pytest.mark.parametrize(
    ("killed", "code", "said"),
    [
        ("os.getppid()", -signal.SIGKILL, ""),  # the run, whose workers would write beside a new start
        ("os.getpid()", 1, "error: the system killed a worker"),
    ],
)
def test_the_workers_of_a_killed_run_end_with_it_and_one_that_the_system_kills_ends_it(
    texts, lines, make, tokenizer_folder, tmp_path, killed, code, said
):
    kill = f"def kill(*part):\n    os.kill({killed}, signal.SIGKILL)\n    signal.alarm(60)\n    signal.pause()\n"
    words = [f"--source={lines}", f"--output={tmp_path / 'out'}", f"--tokenizer={tokenizer_folder}", "--processes=2"]
    process = start_script(tmp_path / "killed.py", kill + "passes._write_part = kill\n", *words)
    found = process.communicate(timeout=30)[1]  # up to the end of the last process that can write there
    assert process.returncode == code
    assert said in found
    assert "Traceback" not in found
    assert documents_of(make(lines)) == Counter(texts)


def test_a_kill_while_parts_are_removed_loses_no_document(texts, lines, make, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "UNIT_BYTES", 5000)

    def cut_short(store, names, remove=LocalStore.remove):
        remove(store, names[:3])
        raise KeyboardInterrupt

    with patch("data.prepare.passes._write_bucket", side_effect=KeyboardInterrupt), STOP:
        make(lines)
    with patch.object(LocalStore, "remove", cut_short), STOP:
        make(lines, block_mb=0.01)  # by another plan, so that the parts of the first go
    assert documents_of(make(lines)) == Counter(texts)


def test_the_files_of_others_in_the_folder_are_kept(lines, make, tmp_path):
    """Also those that the Hugging Face Hub names much as we name shards."""
    others = ["train-00000-of-00002.parquet", "train-00000.arrow.bak", "train-0.arrow"]
    shards = ["train-00099.arrow", ".validation-00001.arrow.tmp", "train-100000.arrow"]
    (tmp_path / "out").mkdir()
    for name in (*others, *shards):
        (tmp_path / "out" / name).write_bytes(b"old")
    left = contents(make(lines))
    assert {*others, *shards} & left.keys() == {*others}


def test_a_folder_is_written_by_one_process_and_a_finished_dataset_is_never_replaced(lines, make, tmp_path):
    """Its own files are no source, though bad records are listed in one of them."""
    output = Output(str(tmp_path / "out"))
    with output.locked(), pytest.raises(DataError, match="/out: another process is writing there"):
        make(lines)
    lines.write_text(lines.read_text() + "no JSON\n")
    before = contents(make(lines, skip_bad=1))
    assert BAD_RECORDS in before
    with pytest.raises(DataError, match=r"/out: already holds .* remove its manifest\.json"):
        make(lines, skip_bad=1, max_characters=100)
    assert contents(tmp_path / "out") == before
    (tmp_path / "out" / "manifest.json").unlink()
    lines.rename(tmp_path / "out" / "in.jsonl")
    after = contents(make(tmp_path / "out", skip_bad=1, max_characters=100))
    assert after["train-00000.arrow"] != before["train-00000.arrow"]
    assert len(after[BAD_RECORDS].splitlines()) == 1


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl, line at byte 14: must be JSON"),
        ("a.jsonl", b'{"body": "x"}\n', r"line at byte 0: no text under 'text'; it has body; choose with --keys"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "cut \\ud83d"}\n', r"jsonl, line at byte 14: .* '\\ud83d' .*surrogates"),
        ("a.json", b'[{"text": "x"}, 3]', r"a\.json, record 1: .*: 3"),
        ("a.jsonl", b"\n", "holds nothing that can be used"),
        ("a.parquet", b"PAR1", r"a\.parquet: cannot be read: .*Parquet file size is 4 bytes"),
        ("a.txt", b"abc\xff", r"a\.txt: .*utf-8.* byte 0xff in position 3"),
        ("a.csv", b'text\n"never closed\n', r"a\.csv: cannot be read: ValueError: line 2"),
        ("a.csv", b"n,text\n1,one\n2,two,3\n", r"a\.csv, row 1: has more cells"),
        # a frame of zstd --long=31, which asks for a window of 2 GiB
        ("a.txt.zst", bytes.fromhex("28b52ffd00a8210000") + b"aaaa", r"a\.txt\.zst: .*--long=27"),
    ],
)
def test_bad_input_is_named(tmp_path, name, content, message, capsys):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit):
        main([f"--source={tmp_path / name}", f"--output={tmp_path / 'out'}"])
    assert re.search(f"^error: .*{message}", capsys.readouterr().err, re.MULTILINE)
    assert not (tmp_path / "out").exists()


def test_bad_records_are_left_out_counted_and_listed(texts, make, tmp_path, monkeypatch):
    """Each with its place, which is counted here."""
    monkeypatch.setattr(readers, "UNIT_BYTES", 3000)
    source = write_jsonl(tmp_path / "in.jsonl", texts)
    bad = [b'{"text": "cut \xe2\x82"}\n', b'{"text": null}\n', b'{"text": "\\ud83d"}\n', b"no JSON\n", b'["text"]\n']
    begins = []
    content = b""
    for number, line in enumerate(source.read_bytes().splitlines(keepends=True)):
        if number % 80 == 7:
            begins.append(len(content))
            content += bad.pop()
        content += line
    source.write_bytes(content)
    with pytest.raises(DataError, match=r"5 .*--skip-bad 4"):
        make(source, skip_bad=4)  # which keeps what is done for a larger number
    folder = make(source, skip_bad=5)
    listed = (folder / BAD_RECORDS).read_text().splitlines()
    assert [line.split(": ")[0] for line in listed] == [f"{source}, line at byte {begin}" for begin in begins]
    assert json.loads((folder / "manifest.json").read_bytes())["bad_records"] == 5
    assert documents_of(folder) == Counter(texts)


@pytest.mark.parametrize(
    "flags",
    [
        "--shard-mb=0",
        "--tokenizer=nothing",
        "--source=nothing.txt",
        "--source=-",
        "--source=pipe",
        "--output=hdfs://name/out",
        "--vocab-size=256",
        "--vocab-size=300 --tokenizer=T",
        "--eos-token=</s>",
        "--skip-bad=-1",
        "--keys=a,b",
        "--keys=body --source=a.txt",
        "--separator=x",
        "--seq-len=8",
        "--dtype=uint16",
        "--dtype=int3 --format=tokens --tokenizer=T",
        "--format=sft",
        "--format=tokens",
        "--seq-len=1 --format=chat --tokenizer=T",
        "--chat-template=a.txt",
        "--shardmb=3",
        "--processes=2 --cluster=tcp://head",
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(lines, tokenizer_folder, tmp_path, monkeypatch, flags, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    os.mkfifo("pipe")  # to read it would take for ever
    files = set(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        main(["--source=in.jsonl", "--output=out", *flags.replace("=T", f"={tokenizer_folder}").split()])
    option, _, value = flags.split()[0].partition("=")
    said = capsys.readouterr().err.splitlines()[-1]
    assert "error: " in said
    assert value in said or value in said.lower()
    assert option in said or value == "nothing"
    assert set(tmp_path.iterdir()) == files


def test_the_printed_command_trains_on_the_dataset(tokenizer_folder, tmp_path, capsys):
    """Also where its folder has a space."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "response": "b"}')
    words = ["--format=sft", "--seq-len=64", f"--output={tmp_path}/an output", "--validation-fraction=0"]
    main([f"--source={tmp_path}/in.jsonl", f"--tokenizer={tokenizer_folder}", *words])
    script, *settings = shlex.split(capsys.readouterr().out.partition("train on it: ")[2])
    assert (ROOT / script).is_file()
    config = load_config(settings)
    assert config.data.datasets == (f"{tmp_path}/an output",)
    assert (config.data.mask_documents, config.training.seq_len) == (True, 64)


# ---------------------------------------------------------------- which files


@pytest.mark.parametrize("scheme", ["", "memory:/"])
def test_a_folder_is_read_with_all_below_it_and_what_is_left_out_is_said(tmp_path, caplog, scheme):
    read = ["a.TXT", "b.ndjson", "c.json.gz", "d.md.zst", "e.jsonl", "more/deep/f.Parquet"]
    left_out = [".ipynb_checkpoints/a.txt", ".b.txt", "more/.git/c.txt", "package.json", "a.png", "labels.csv"]
    for name in (*read, *left_out, "train-00000.arrow"):
        system = fsspec.filesystem("memory" if scheme else "file", auto_mkdir=True)
        system.pipe_file(f"{tmp_path}/{name}", b"x")
    if not scheme:
        (tmp_path / "more" / "up").symlink_to("..")  # which leads back
    found = sources.list_files([f"{scheme}{tmp_path}"])
    assert [file.url.rpartition(f"{tmp_path}/")[2] for file in found] == read
    assert f" {7 + (not scheme)} left out" in caplog.text
    named = sources.list_files([f"{scheme}{tmp_path}/{name}" for name in ("*.json", "mor*", ".b.txt")])
    assert [Path(file.url).name for file in named] == [".b.txt", "f.Parquet", "package.json"]


def test_a_file_is_read_once_whatever_its_names(tmp_path):
    """Links to files are followed, as in the Hugging Face cache, where every file of a snapshot is one."""
    for folder in ("blobs", "one", "two"):
        (tmp_path / folder).mkdir()
    (tmp_path / "blobs" / "0123").write_text("hello")
    for snapshot in ("one", "two"):
        (tmp_path / snapshot / "a.txt").symlink_to("../blobs/0123")
    found = sources.list_files([f"{tmp_path}/one/a.txt", f"{tmp_path}/one/../*"])
    assert [(Path(file.url).name, file.size) for file in found] == [("a.txt", 5)]


def test_what_cannot_be_listed_is_not_taken_for_nothing(tmp_path):
    """Its text would be missing from the dataset."""
    (tmp_path / "c.txt").symlink_to("nowhere")
    refused = PermissionError(errno.EACCES, "Permission denied", "in/folder")
    for broken in (nullcontext(), patch("os.scandir", side_effect=refused)):
        with broken, pytest.raises(DataError, match=r"cannot be listed: .*(c\.txt|in/folder)"):
            sources.list_files([str(tmp_path)])


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", b'{"text": "x"}\n'), ("a.bin", b"\1\0\0\0")])
def test_an_empty_answer_of_a_server_is_no_end(name, content, tmp_path):
    system, url = fsspec.filesystem("memory"), f"memory:/{tmp_path}/{name}"
    system.pipe_file(url, 2 * content)
    (unit,) = readers.plan_units(sources.list_files([url]))
    system.pipe_file(url, content)
    read = readers.documents(unit)
    if name == "a.bin":
        read = token_documents(unit, word_tokenizer(400), "uint16")
    with pytest.raises(DataError, match=name):
        list(read)


# ---------------------------------------------------------------- other projects' tokens


@pytest.fixture
def take(make):
    """Prepares files of tokens, all for training."""
    return lambda *given, **options: make(*given, **{"format": "tokens", "validation_fraction": 0} | options)


def tokens_of(folder, split="train"):
    return Counter(map(tuple, chain.from_iterable(stored_blocks(folder, split))))


HEADERS = {"GPT-2 header": (20240520, "<u2"), "Llama 3 header": (20240801, "<u4")}


def llm_c_header(magic, dtype, ids):
    return np.array([magic, 1, len(ids), *[0] * 253], "<i4").tobytes() + np.array(ids, dtype).tobytes()


@pytest.mark.parametrize("layout", ["uint16", "uint32", "uint64", *HEADERS])
def test_tokens_become_documents_with_one_eos_each(layout, take, tmp_path, monkeypatch):
    """The last one may lack it. Some are held out."""
    monkeypatch.setattr("data.prepare.tokens.READ_BYTES", 24)
    documents = [[5, 6], [7], *([i, 1 + i % 9] * (1 + i % 5) for i in range(8, 300))]
    ids = [0, 5, 6, 0, 7, 0, 0]
    for document in documents[2:]:
        ids += [0, *document]
    options = {"validation_fraction": 0.1}
    if layout in HEADERS:
        (tmp_path / "a.bin").write_bytes(llm_c_header(*HEADERS[layout], ids))
    else:
        options["dtype"] = layout
        np.array(ids, layout.removeprefix("u")).tofile(tmp_path / "a.bin")  # signed, which has the same bits
    folder = take(tmp_path / "a.bin", **options)
    train, held_out = tokens_of(folder), tokens_of(folder, "validation")
    assert train + held_out == Counter((*document, 0) for document in documents)
    assert held_out


@pytest.mark.parametrize(
    ("name", "content", "options", "named"),
    [
        ("a.bin", b"\1\0\x90\1", {}, r"a\.bin: id 400 .* 400"),
        ("a.bin", b"\1\1\2\1" * 9, {}, r"a\.bin: none of its ids ends a document, as 0 would"),
        ("a.bin", b"\1\0\0\0", {"dtype": ""}, r"a\.bin: .*--dtype"),
        ("a.bin", llm_c_header(20240520, "<u4", [7, 8, 0]), {}, r"a\.bin: its header says 3 ids of uint16, it holds 6"),
        ("a.bin", llm_c_header(20240801, "<u4", [7, 8, 0]), {}, r"a\.bin: --dtype uint16: its header says uint32"),
        ("a.bin", b"\x93NUMPY" + bytes(20), {}, r"a\.bin: \.npy"),
        ("a.bin", b"\1\0\0\0", {"keys": "ids"}, r"a\.bin: --keys ids"),
        ("a.bin.gz", b"\1\0\0\0", {}, r"a\.bin\.gz: .*not compressed"),
        (
            "a.parquet",
            {"ids": [[1]], "mask": [[1]], "n": [1]},
            {},
            r"\['ids', 'mask'\]: .*; it has ids .*, n \(int64\)",
        ),
        ("a.parquet", {"ids": [[1, None]]}, {}, "'ids' holds null"),
        ("a.parquet", {"ids": [[1, 2], None]}, {}, "'ids' holds null"),
        ("a.parquet", {"ids": [[1], [2, -1]]}, {}, "id -1 "),
    ],
)
def test_tokens_that_cannot_be_used_are_named(take, tmp_path, name, content, options, named):
    file = tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
        options = {"dtype": "uint16"} | options
    else:
        write_table(file, **content)
    with pytest.raises(DataError, match=named):
        take(file, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "list_of"),
    [
        ("a.tokens", pa.large_list(pa.uint64())),
        ("a.parquet", pa.list_(pa.int32(), 3)),
    ],
    ids=str,
)
def test_tokens_in_tables_are_documents_by_the_row(name, list_of, take, tmp_path):
    rows = [[5, 6, 0], [7, 8, 9], [3, 0, 4], [1, 0, 2], [0, 0, 0]]  # 0 is eos
    file = write_table(tmp_path / name, n=range(len(rows)), input_ids=pa.array(rows, list_of))
    each = Counter([(5, 6, 0), (7, 8, 9, 0), (3, 0), (4, 0), (1, 0), (2, 0)])
    assert tokens_of(take(file)) == each

"""Turn text into a dataset that training reads.

    python -m data.prepare --source stdlib --output datasets/stdlib

Two passes, each on all cores. The first tokenises the units of the input and sorts each
unit's documents into buckets; the second shuffles a bucket's documents and writes them as
a shard. A document's bucket and place are hashes of where it stands in the input, and
whether it is held out is a hash of its text, so the output does not depend on the number
of processes. What is finished stays in OUTPUT/.parts until the end: after a kill the same
command goes on from there. manifest.json is written last and makes the dataset valid.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from config import TitaniteError
from data.order import derive_key, random_words
from data.shards import DataError, Shard, token_type
from data.sources import COMPRESSIONS, UNIT_BYTES, File, Unit, documents, list_files, plan_units
from data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from data.writer import WrittenShard, token_dtype, write_atomically, write_manifest, write_shard

PARTS = ".parts"
BATCH_BYTES = 4 * 2**20  # text tokenised in one call
PART_TOKENS = 32 * 2**20  # tokens a process holds before it writes a part
TOKENIZER_SAMPLE_BYTES = 64 * 2**20  # text a tokenizer is trained on


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that decides the bytes of the dataset; a change of it makes finished parts useless."""

    input: str  # hash of the input files' names and sizes
    text_key: str
    max_characters: int
    tokenizer: str  # fingerprint
    dtype: str
    validation_fraction: float
    block_bytes: int
    train_buckets: int
    validation_buckets: int

    def bucket(self, text: str, word: int) -> int:
        """The bucket of a document; those of validation follow those of train."""
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        if int.from_bytes(digest, "little") < self.validation_fraction * 2**64:
            return self.train_buckets + word % self.validation_buckets
        return word % self.train_buckets


class Job(NamedTuple):
    """What a worker process needs to know."""

    plan: Plan
    tokenizer: Tokenizer
    folder: Path


def prepare(
    sources: Sequence[str],
    output: str,
    tokenizer: str = "",
    vocab_size: int = 4096,
    eos_token: str = "",
    text_key: str = "text",
    max_characters: int = 0,
    validation_fraction: float = 0.02,
    block_mb: float = 8,
    shard_mb: float = 256,
    processes: int = 0,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Prepare a dataset; `--help` says what the parameters mean. Returns its manifest.

    Raises DataError or TokenizerError.
    """
    folder = Path(output)
    if (folder / "manifest.json").exists() and not overwrite:
        raise DataError(f"{folder}: already holds a finished dataset; give --overwrite to replace it")
    files = list_files(sources)
    units = plan_units(files)
    chosen = load_tokenizer(tokenizer, eos_token) if tokenizer else _trained_tokenizer(units, text_key, vocab_size)
    dtype = token_dtype(chosen.vocab_size)
    shards = _estimated_bytes(files, dtype) / (shard_mb * 2**20)
    plan = Plan(
        input=hashlib.sha256(json.dumps(files).encode()).hexdigest(),
        text_key=text_key,
        max_characters=max_characters,
        tokenizer=chosen.fingerprint,
        dtype=dtype,
        validation_fraction=validation_fraction,
        block_bytes=int(block_mb * 2**20),
        train_buckets=max(1, round(shards * (1 - validation_fraction))),
        validation_buckets=max(1, round(shards * validation_fraction)),
    )
    _start_or_go_on(folder, plan, chosen)
    workers = processes or os.cpu_count() or 1
    _run_all(workers, folder, _tokenize_unit, list(enumerate(units)), "tokenise", [unit.bytes for unit in units])
    if not any((folder / PARTS).glob("unit-*.arrow")):
        raise DataError("the input holds no text: nothing to prepare")
    buckets = list(range(plan.train_buckets + plan.validation_buckets))
    _run_all(workers, folder, _write_bucket, buckets, "write", [1] * len(buckets))
    manifest = write_manifest(folder, chosen, _written(folder, len(buckets)))
    shutil.rmtree(folder / PARTS)
    return manifest


def _trained_tokenizer(units: list[Unit], text_key: str, vocab_size: int) -> Tokenizer:
    """A tokenizer learnt from units spread evenly over the input, the beginning of each."""
    step = max(1, sum(unit.bytes for unit in units) // TOKENIZER_SAMPLE_BYTES)
    chosen = units[::step]
    each = max(TOKENIZER_SAMPLE_BYTES // max(len(chosen), 1), UNIT_BYTES)
    return train_tokenizer(chain.from_iterable(_beginning(unit, text_key, each) for unit in chosen), vocab_size)


def _beginning(unit: Unit, text_key: str, characters: int) -> Iterator[str]:
    """The first documents of a unit, until they have this many characters."""
    for text in documents(unit, text_key):
        yield text
        characters -= len(text)
        if characters <= 0:
            return


def count(sources: Sequence[str], text_key: str = "text", max_characters: int = 0) -> dict[str, int]:
    """What `prepare` would read, without writing anything. Raises DataError."""
    files = list_files(sources)
    counts = {"files": len(files), "bytes": sum(file.size for file in files), "documents": 0, "empty": 0}
    counts |= {"characters": 0}
    for unit in tqdm(plan_units(files), desc="count", unit=" units"):
        for text in documents(unit, text_key, max_characters):
            counts["documents" if text else "empty"] += 1
            counts["characters"] += len(text)
    return counts


def _estimated_bytes(files: Iterable[File], dtype: str) -> float:
    """Of the tokens: 4 bytes of text make about one token, compression is about 5-fold."""
    text = sum(file.size * (5 if file.url.endswith((*COMPRESSIONS, ".parquet")) else 1) for file in files)
    return text / 4 * np.dtype(dtype).itemsize


def _start_or_go_on(folder: Path, plan: Plan, tokenizer: Tokenizer) -> None:
    """Keep the parts of an interrupted preparation by the same plan; remove what else we wrote."""
    parts = folder / PARTS
    record = json.dumps(asdict(plan), indent=1)
    (folder / "manifest.json").unlink(missing_ok=True)
    if not (parts / "plan.json").is_file() or (parts / "plan.json").read_text(encoding="utf-8") != record:
        shutil.rmtree(parts, ignore_errors=True)
        for file in (*folder.glob("train-*"), *folder.glob("validation-*")):
            file.unlink()
        parts.mkdir(parents=True)
        write_atomically(parts / "plan.json", record.encode())
    tokenizer.save(folder)


@lru_cache(maxsize=1)
def _load_job(folder: str) -> Job:
    """The job in a folder, read once by each worker process."""
    record = json.loads((Path(folder) / PARTS / "plan.json").read_text(encoding="utf-8"))
    return Job(Plan(**record), load_tokenizer(folder), Path(folder))


# ---------------------------------------------------------------- all cores

Task = Callable[[Job, Any], int]


def _run_all(workers: int, folder: Path, function: Task, tasks: list[Any], title: str, weights: list[int]) -> None:
    """Run `function(job, task)` for every task, under a progress bar with tokens/s and the time left."""
    tokens, begin = 0, time.monotonic()
    _load_job.cache_clear()  # the folder may have held another plan
    with tqdm(total=sum(weights), desc=title, unit="B" if title == "tokenise" else " shards", unit_scale=True) as bar:
        for number, result in _results(workers, str(folder), function, tasks):
            tokens += result
            bar.set_postfix_str(f"{tokens / max(time.monotonic() - begin, 1e-9):,.0f} tokens/s", refresh=False)
            bar.update(weights[number])


def _results(workers: int, folder: str, function: Task, tasks: list[Any]) -> Iterator[tuple[int, int]]:
    """(number of the task, its result) as they finish, a few tasks in flight at a time."""
    if workers == 1 or len(tasks) == 1:
        for number, task in enumerate(tasks):
            yield number, _work(folder, function, task)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(tasks)), spawn, _start_worker) as pool:
        running: dict[Future[int], int] = {}
        waiting = iter(enumerate(tasks))
        try:
            while True:
                for number, task in islice(waiting, 2 * workers - len(running)):
                    running[pool.submit(_work, folder, function, task)] = number
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores


def _work(folder: str, function: Task, task: Any) -> int:
    return function(_load_job(folder), task)


# ---------------------------------------------------------------- pass 1: tokenise


def _tokenize_unit(job: Job, task: tuple[int, Unit]) -> int:
    """Write the documents of a unit, sorted by bucket, as parts. Returns its tokens."""
    number, unit = task
    parts = job.folder / PARTS
    record = parts / f"unit-{number:06}.json"
    if record.exists():
        return json.loads(record.read_text(encoding="utf-8"))["tokens"]
    key = derive_key("document", number)
    seen = written = tokens = held = 0
    batches: list[pa.RecordBatch] = []
    for texts in _batched(documents(unit, job.plan.text_key, job.plan.max_characters)):
        words = random_words(len(texts), key, first=seen)
        batches.append(_tokenize(job, texts, words))
        seen += len(texts)
        held += len(batches[-1].column("tokens").values)
        if held >= PART_TOKENS:
            _write_part(job.plan, batches, parts / f"unit-{number:06}-{written:04}.arrow")
            tokens, held, written, batches = tokens + held, 0, written + 1, []
    if batches:
        _write_part(job.plan, batches, parts / f"unit-{number:06}-{written:04}.arrow")
    write_atomically(record, json.dumps({"tokens": tokens + held, "documents": seen}).encode())
    return tokens + held


def _batched(texts: Iterable[str]) -> Iterator[list[str]]:
    """Lists of non-empty texts, about BATCH_BYTES together."""
    batch: list[str] = []
    size = 0
    for text in texts:
        if text:
            batch.append(text)
            size += len(text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _tokenize(job: Job, texts: list[str], words: np.ndarray) -> pa.RecordBatch:
    """Bucket, sort key and tokens of each text."""
    ids = job.tokenizer.encode_documents(texts)
    lengths = [len(document) for document in ids]
    values = np.fromiter(chain.from_iterable(ids), job.plan.dtype, sum(lengths))
    offsets = np.cumsum([0, *lengths], dtype=np.int32)
    buckets = [job.plan.bucket(text, int(word)) for text, word in zip(texts, words, strict=True)]
    tokens = pa.ListArray.from_arrays(offsets, values, type=token_type(job.plan.dtype))
    return pa.record_batch({"bucket": pa.array(buckets, pa.uint32()), "word": words, "tokens": tokens})


def _write_part(plan: Plan, batches: list[pa.RecordBatch], path: Path) -> None:
    """One Arrow file with a record batch for each bucket, in the buckets' order."""
    table = pa.Table.from_batches(batches).combine_chunks()
    buckets = table.column("bucket").to_numpy()
    table = table.take(np.argsort(buckets, kind="stable")).drop_columns("bucket").combine_chunks()
    bounds = np.cumsum([0, *np.bincount(buckets, minlength=plan.train_buckets + plan.validation_buckets)])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        for first, stop in pairwise(bounds):
            writer.write_batch(_one_batch(table.slice(first, stop - first)))
    write_atomically(path, memoryview(sink.getvalue()))


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


# ---------------------------------------------------------------- pass 2: shuffle and write


def _write_bucket(job: Job, bucket: int) -> int:
    """Write the shard that a bucket makes, and a record of its blocks. Returns its tokens."""
    plan, parts = job.plan, job.folder / PARTS
    record = parts / f"bucket-{bucket:06}.json"
    if record.exists():
        return json.loads(record.read_text(encoding="utf-8"))["shard"]["tokens"]
    split, number = ("train", bucket) if bucket < plan.train_buckets else ("validation", bucket - plan.train_buckets)
    written = write_shard(job.folder, split, number, _shuffled_documents(parts, bucket), plan.block_bytes)
    content = {"shard": written.shard._asdict(), "blocks": written.blocks}
    write_atomically(record, json.dumps(content).encode())
    return written.shard.tokens


def _shuffled_documents(parts: Path, bucket: int) -> pa.ListArray:
    """The documents of a bucket from all parts, in the order of their sort keys."""
    batches = []
    for path in sorted(parts.glob("unit-*.arrow")):
        with pa.OSFile(str(path)) as part:  # read, not mapped: there may be more parts than open files are allowed
            batches.append(pa.ipc.open_file(part).get_batch(bucket))
    table = pa.Table.from_batches(batches)
    if sum(len(chunk.values) for chunk in table.column("tokens").chunks) >= 2**31:
        raise DataError(f"shard {bucket} would hold 2^31 tokens or more; give a smaller --shard-mb")
    words = table.column("word").to_numpy()
    tokens = table.column("tokens").combine_chunks()
    return tokens.take(pa.array(np.argsort(words, kind="stable")))


def _written(folder: Path, buckets: int) -> list[WrittenShard]:
    records = [
        json.loads((folder / PARTS / f"bucket-{bucket:06}.json").read_text(encoding="utf-8"))
        for bucket in range(buckets)
    ]
    return [WrittenShard(Shard(**record["shard"]), record["blocks"]) for record in records]


# ---------------------------------------------------------------- command line


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data.prepare", description="Turn text into a dataset.")
    add = parser.add_argument
    add(
        "--source",
        nargs="+",
        required=True,
        help="stdlib, or folders, files, globs or URLs of text, JSON lines, Parquet",
    )
    add("--output", required=True, help="folder of the dataset")
    add("--tokenizer", default="", help="tokenizer.json, or a folder with one; default: train one on the text")
    add("--vocab-size", type=int, default=4096, help="tokens of a trained tokenizer (default %(default)s)")
    add("--eos-token", default="", help="token that ends a document; default: the tokenizer's own")
    add("--text-key", default="text", help="key or column of the text in JSON lines and Parquet (default %(default)s)")
    add(
        "--max-characters", type=int, default=0, help="cut longer texts at line ends into documents; 0: never (default)"
    )
    add("--validation-fraction", type=float, default=0.02, help="share of documents held out (default %(default)s)")
    add("--block-mb", type=float, default=8, help="MiB of tokens shuffled and read as one block (default %(default)s)")
    add("--shard-mb", type=float, default=256, help="MiB of tokens in a file, about (default %(default)s)")
    add("--processes", type=int, default=0, help="processes; 0: one for each core (default)")
    add("--overwrite", action="store_true", help="replace a finished dataset")
    add("--dry-run", action="store_true", help="read everything, count it and write nothing")
    arguments = vars(parser.parse_args(argv))
    arguments["sources"] = arguments.pop("source")
    try:
        if arguments.pop("dry_run"):
            for name, number in count(arguments["sources"], arguments["text_key"], arguments["max_characters"]).items():
                print(f"{name}: {number:,}")
            return
        manifest = prepare(**arguments)
    except TitaniteError as error:
        sys.exit(f"error: {error}")
    for split in ("train", "validation"):
        shards = [shard for shard in manifest["shards"] if shard["split"] == split]
        total, tokens = sum(shard["documents"] for shard in shards), sum(shard["tokens"] for shard in shards)
        print(f"{split}: {total:,} documents, {tokens:,} tokens in {len(shards)} files")
    print(f"vocabulary {manifest['vocab_size']}, token {manifest['eos_id']} ends a document")
    print(f"ready: {arguments['output']}")


if __name__ == "__main__":
    main()

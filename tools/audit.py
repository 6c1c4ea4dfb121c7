"""List the documents that a run was trained on, and prove that each sample came once.

    python -m tools.audit --run outputs/RUN --steps 100:103     the documents of steps 100 to 102, and their text
    python -m tools.audit --run outputs/RUN --prove             read back every step of a run

The proof uses the ledger that every rank keeps (data.ledger). It drops the steps that a resume from an earlier
checkpoint made void. It checks that the other steps follow each other without gap or overlap, alike on every rank, that
the tokens that each rank recorded are those of the dataset at that place in the order, and that no step is missing at
the end, as far as exit.json tells. It follows that each token was an input exactly once per consumed epoch.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import chain, groupby
from pathlib import Path

import numpy as np
from tqdm import tqdm

from checkpoint.branch import read_parent
from config import Config, TitaniteError, command_line, from_dict, read_recorded
from data.ledger import Place, Step, checksum, read_ledger
from data.shards import Dataset, Split, open_dataset
from data.stream import Stream


def open_datasets(run: Path, steps: Sequence[Step]) -> tuple[list[Dataset], dict[str, Stream]]:
    """The datasets of `steps`, and hash → stream, to be read at any place.

    Looks for each where the steps found it, then where the run's config names it. Raises TitaniteError.
    """
    config = from_dict(read_recorded((run / "config.toml").read_bytes(), run))
    urls = {name: step.urls.get(name, "") for step in steps for name in step.began.segment.datasets}
    found = [_find(name, url, config) for name, url in urls.items()]
    order, readers = steps[0].place, ThreadPoolExecutor(8)  # not the config's order: a refused start may have left it
    streams = [Stream(own.split("train"), own.hash, readers, order.seed, order.window_blocks) for own in found]
    return found, dict(zip(urls, streams, strict=True))


def samples(streams: Mapping[str, Stream], step: Step, first: int, count: int) -> Iterator[tuple[Stream, int, int]]:
    """Yield (stream, first token, tokens) of samples [first, first + count) of the step's segment."""
    segment = step.place.segment
    for dataset, start in zip(*segment.locate(first, count), strict=True):
        yield streams[segment.datasets[dataset]], int(start), segment.seq_len


def checksums(streams: Mapping[str, Stream], step: Step) -> list[int]:
    """The checksum that each rank should have recorded for a step. Opens every window of the data once."""
    shape = step.shape
    sums = [0] * shape.dp_size
    stop = step.first + shape.samples
    for number, first in enumerate(range(step.first, stop, shape.local_batch_size)):
        rank = number % shape.dp_size
        for stream, start, seq_len in samples(streams, step, first, shape.local_batch_size):
            tokens, *_ = stream.read(start, seq_len)
            sums[rank] = checksum([tokens], sums[rank])
    return sums


def _find(name: str, url: str, config: Config) -> Dataset:
    """Find the dataset with hash `name` at `url` or in data.datasets. Raises TitaniteError."""
    others = []
    for place in filter(None, dict.fromkeys([url, *config.data.datasets])):
        try:
            dataset = open_dataset(place.rstrip("/"), config)
            if dataset.hash == name:
                return dataset
            others.append(f"{place}: holds dataset {dataset.hash}")
        except TitaniteError as error:
            others.append(str(error))
    advice = "put it back, or name its new place in data.datasets of the run's config.toml"
    raise TitaniteError(f"{'; '.join(others)}; this run has read dataset {name} at {url}: {advice}")


def trained_steps(run: Path) -> tuple[list[Step], int]:
    """The steps that led to the run's last weights, and the number of steps that resumes made void.

    Reads the ledger of data-parallel rank 0. Raises TitaniteError unless each step continues all datasets, in the same
    order, where the one before ended.
    """
    recorded, last_began = _read_rank(run, 0)
    kept = _lineage(recorded, last_began) if recorded and last_began else []
    if not kept:
        otherwise = f"all {len(recorded):,} were made void by a resume" if recorded else "is it a run folder?"
        raise TitaniteError(f"{run}: no step of data-parallel rank 0 is recorded; {otherwise}")
    ended: dict[str, int] = {}  # dataset → its tokens that the steps before have consumed
    order = kept[0].place[:2]
    for number, step in enumerate(kept):
        own_order = step.place[:2]
        if own_order != order:
            what = "data order than the next (seed, window_blocks)"
            raise TitaniteError(f"{run}: step {number} has another {what}: {order}, {own_order}")
        begins = step.place.consumed
        for name in sorted(begins.keys() | ended.keys()):
            gap = begins.get(name, 0) - ended.get(name, 0)
            if gap:
                fault = "are missing" if gap > 0 else "are repeated"
                what = f"{abs(gap):,} tokens of dataset {name} {fault}"
                raise TitaniteError(f"{run}: {what} between step {number} and the next")
        ended = step.end.consumed
    return kept, len(recorded) - len(kept)


def _lineage(recorded: list[Step], last_began: Place) -> list[Step]:
    """The steps that led to the last weights, in order."""
    starts = [list(steps) for _, steps in groupby(recorded, key=lambda step: id(step.began))]
    ends = [steps[-1].end.tokens for steps in starts]
    until = ends[-1] if last_began is recorded[-1].began else last_began.tokens
    pieces = []
    for number, start in reversed(list(enumerate(starts))):
        # The piece found before begins at `until`. A start may not reach that place, if it resumed from an older
        # checkpoint because the newest was unreadable: an earlier one does. If none does, steps are missing:
        # `trained_steps` reports that, behind the start that came furthest.
        if ends[number] >= min(until, max(ends[: number + 1])):
            pieces.append([step for step in start if step.place.tokens < until])
            until = min(until, start[0].began.tokens)
    return list(chain.from_iterable(reversed(pieces)))


def _read_rank(run: Path, rank: int) -> tuple[list[Step], Place | None]:
    """The ledger of a data-parallel rank; a branch's after its parent's up to the fork. Raises TitaniteError."""
    try:
        steps, last_began = read_ledger(run / "data" / f"rank-{rank:05}.jsonl")
    except (ValueError, KeyError, TypeError) as error:
        raise TitaniteError(f"{run}/data: not a ledger: {type(error).__name__} {error}") from None
    parent = read_parent(run)
    if not parent:
        return steps, last_began
    if not (parent.folder / "config.toml").is_file():
        raise TitaniteError(f"{run}: its parent is not in {parent.folder}: put it, or a link to it, back there")
    before = [step for step in _read_rank(parent.folder, rank)[0] if step.end.tokens <= parent.tokens]
    return before + steps, last_began


def prove(run: Path) -> list[str]:
    """Check a run as this module's docstring says and return the lines of the proof.

    Raises TitaniteError naming the first step and rank that fails.
    """
    steps, void = trained_steps(run)
    recorded = _recorded(run, steps)
    reached = _reached(run)
    if len(steps) < reached:
        ledger = f"but rank 0's ledger ends with step {len(steps):,}"
        raise TitaniteError(f"{run}: step {reached:,} was trained, as exit.json says, {ledger}")
    is_cut = len(steps) > reached and (recorded[: steps[-1].shape.dp_size, -1] < 0).any()
    if is_cut:  # killed before all ranks began it
        cut = steps.pop()
        if not steps:
            raise TitaniteError(f"{run}: no step is recorded on all of its {cut.shape.dp_size} data-parallel ranks")
    datasets, streams = open_datasets(run, steps)
    for number, step in enumerate(tqdm(steps, desc="prove", unit=" steps"), start=1):
        own = recorded[: step.shape.dp_size, number - 1]
        if (own < 0).any():
            raise TitaniteError(f"{run}: rank {(own < 0).argmax()} has no record of step {number} that fits rank 0's")
        wrong = own != checksums(streams, step)
        if wrong.any():
            raise TitaniteError(f"{run}: step {number}: rank {wrong.argmax()} was given other tokens than the data has")
    lines = _proof(steps, void, datasets)
    if is_cut:
        lines.append(f"step {len(steps) + 1} left out: some ranks had not begun it when the run ended")
    return lines + _origins(run)


def _proof(steps: Sequence[Step], void: int, datasets: Sequence[Dataset]) -> list[str]:
    """What was proven of steps and datasets."""
    end = steps[-1].end
    ranks = [step.shape.dp_size for step in steps]
    sizes = f"{sorted(set(ranks))} data-parallel ranks"
    lines = [
        f"{len(steps):,} steps, {end.tokens:,} tokens, without gap or overlap, on {sizes}",
        f"steps made void by a resume, left out: {void:,}; batches rebuilt and found equal: {sum(ranks):,}",
    ]
    for dataset in datasets:
        size = dataset.split("train").total_tokens
        epochs, rest = divmod(end.consumed.get(dataset.hash, 0), size)
        lines.append(f"{dataset.url}: each of its {size:,} tokens x {epochs}, and {rest:,} of epoch {epochs + 1}")
    return lines


def _origins(run: Path) -> list[str]:
    """What else a reader of the proof should know: the run's parent, and steps without an update."""
    lines = []
    folders = [run]
    parent = read_parent(run)
    if parent:
        lines.append(f"the first {parent.step:,} steps are those of {parent.folder}, from which it branched")
        folders.append(parent.folder)
    for folder in folders:
        if (folder / "skipped.jsonl").is_file():
            lines.append(f"{folder}/skipped.jsonl lists steps that consumed their tokens without an update")
    return lines


def _reached(run: Path) -> int:
    """A step that the run has certainly come to, by the record of its last start's end (run.exits)."""
    try:
        ended = json.loads((run / "exit.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # no process could write it, or not to its end
        return 0
    return ended["step"] if ended["kind"] in ("finished", "stopped") else ended["last_checkpoint"] or 0


def _recorded(run: Path, steps: list[Step]) -> np.ndarray:
    """The checksums that each rank recorded for rank 0's steps, int64 [ranks, steps]; -1 where no record fits.

    If starts from the same place recorded a step repeatedly, the last record counts: a resume made the others void.
    Raises TitaniteError if the steps of a rank within one start do not follow each other.
    """
    numbers = {_line_key(step): number for number, step in enumerate(steps)}
    found = np.full((max(step.shape.dp_size for step in steps), len(steps)), -1)
    found[0] = [step.crc32 for step in steps]
    for rank in range(1, len(found)):
        before = None
        for own in _read_rank(run, rank)[0]:
            if before and own.began is before.began and own.first != before.first + before.shape.samples:
                order = f"the step from sample {own.first:,} on follows the one from {before.first:,} on"
                raise TitaniteError(f"{run}: rank {rank}: {order}, which has {before.shape.samples:,} samples")
            before = own
            number = numbers.get(_line_key(own))
            if number is not None:
                fits = own._replace(urls=steps[number].urls, crc32=steps[number].crc32) == steps[number]
                found[rank, number] = own.crc32 if fits else -1
    return found


def _line_key(step: Step) -> tuple[int, int, int]:
    return step.place.tokens, step.began.tokens, step.began.segment.seq_len


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.audit", description="Show which documents a run trained on.")
    parser.add_argument("--run", type=Path, required=True, help="folder of a run")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--steps", type=_numbers, help="N or FIRST:STOP, counted from 1: list what these steps read")
    what.add_argument("--prove", action="store_true", help="prove that each sample was trained once")
    options = parser.parse_args(argv)
    with command_line():
        lines = [*prove(options.run), "proven"] if options.prove else list_documents(options.run, options.steps)
        for line in lines:
            print(line)


def _numbers(steps: str) -> range:
    """argparse type of N or FIRST:STOP."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", steps)
    first = int(match[1]) if match else 0
    stop = int(match[2]) if match and match[2] else first + 1
    numbers = range(first, stop)
    if not numbers or first < 1:
        raise argparse.ArgumentTypeError(f"{steps}: must be N or FIRST:STOP, counted from 1, STOP above FIRST")
    return numbers


def list_documents(run: Path, numbers: range) -> Iterator[str]:
    """Yield where each document of the steps `numbers` lies, and the text that was read. Raises TitaniteError."""
    recorded, _ = trained_steps(run)
    if numbers[-1] > len(recorded):
        raise TitaniteError(f"--steps {numbers[0]}:{numbers.stop}: the run has steps 1 to {len(recorded)}")
    steps = recorded[numbers[0] - 1 : numbers[-1]]
    datasets, streams = open_datasets(run, steps)
    tokenizer, read = datasets[0].tokenizer(), lru_cache(64)(Split.read)
    for number, step in zip(numbers, steps, strict=True):
        for sample, (stream, start, seq_len) in enumerate(samples(streams, step, step.first, step.shape.samples)):
            split = stream.split
            for block, row, first, stop in stream.documents(start, seq_len):
                (shard, of_shard), content = split.find(block), read(split, block)
                text = tokenizer.decode(split.ids(content.values[content.offsets[row] :][first:stop]).tolist())
                place = f"{split.files.url}/{shard.file} block {of_shard} row {row} tokens {first}:{stop}"
                yield f"step {number} sample {sample}: {place}: {json.dumps(text, ensure_ascii=False)}"


if __name__ == "__main__":
    main()

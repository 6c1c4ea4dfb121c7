"""List the documents that a run was trained on, and prove that each sample came once.

    python -m tools.audit --run outputs/RUN --steps 100:103     the documents of steps 100 to 102, and their text
    python -m tools.audit --run outputs/RUN --prove             read back every step of a run

The proof uses the ledger that every rank keeps (data.ledger). It drops the steps that a resume from an earlier
checkpoint made void. It checks that the other steps follow each other without gap or overlap, alike on every rank, that
the tokens that each rank recorded are those of the dataset at that position, and that no step is missing at the end, as
far as exit.json tells. It follows that each token was an input exactly once per consumed epoch.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from checkpoint.branch import read_parent
from config import TitaniteError, command_line, from_dict, read_recorded
from data.ledger import Position, Start, checksum, read_ledger
from data.shards import Dataset, Split, open_dataset
from data.stream import Stream


class Step(NamedTuple):
    """A step in the ledger of data-parallel rank 0."""

    start: Start
    number: int  # of the start's steps, from 0
    before: "Step | None"  # which it continued

    @property
    def first(self) -> int:
        """Its first sample in the start's segment."""
        return self.start.began.samples + self.number * self.start.shape.samples

    @property
    def end(self) -> Position:
        """Where the run stood after it."""
        return self.start.began._replace(samples=self.first + self.start.shape.samples)


def open_datasets(run: Path, steps: Sequence[Step]) -> tuple[list[Dataset], dict[str, Stream]]:
    """The datasets of `steps`, and hash → stream, to be read anywhere.

    Each must be where the steps found it, or a link to it. Raises TitaniteError.
    """
    config = from_dict(read_recorded((run / "config.toml").read_bytes(), run))
    urls: dict[str, str] = {}
    for step in steps:
        urls |= step.start.urls
    order = steps[0].start.began  # not the config's, which a refused start may have left
    readers = ThreadPoolExecutor(8)
    found = []
    streams = {}
    for name, url in urls.items():
        dataset = open_dataset(url, config)
        if dataset.hash != name:
            what = f"holds dataset {dataset.hash}, this run has read {name} there: put that, or a link to it, back"
            raise TitaniteError(f"{url}: {what}")
        found.append(dataset)
        streams[name] = Stream(dataset.split("train"), name, readers, order.seed, order.window_blocks)
    return found, streams


def located(streams: Mapping[str, Stream], step: Step) -> Iterator[tuple[Stream, int, int]]:
    """Yield (stream, first token, tokens) of each sample of a step."""
    segment = step.start.began.segment
    datasets, starts = segment.locate(step.first, step.start.shape.samples)
    for dataset, start in zip(datasets.tolist(), starts.tolist(), strict=True):
        yield streams[segment.datasets[dataset]], start, segment.seq_len


def checksums(streams: Mapping[str, Stream], step: Step) -> list[int]:
    """The checksum that each rank should have recorded for a step. Opens every window of the data once."""
    shape = step.start.shape
    sums = [0] * shape.dp_size
    for number, (stream, start, seq_len) in enumerate(located(streams, step)):
        rank = number // shape.local_batch_size % shape.dp_size
        tokens, *_ = stream.read(start, seq_len)
        sums[rank] = checksum([tokens], sums[rank])
    return sums


def trained_steps(run: Path) -> tuple[list[Step], int]:
    """The steps that led to the run's last weights, and the number of steps that resumes made void.

    Reads the ledger of data-parallel rank 0. Raises TitaniteError unless each start continues all datasets, in the same
    order, where a step before it ended. That need not be the last: its newest checkpoint may have been unreadable.
    """
    reached: dict[int, Step] = {}  # tokens consumed → the last step that ended there
    recorded = 0
    last = None
    for start in _read_rank(run, 0).values():
        began = start.began.tokens
        before = reached.get(began, last) if began else None
        ended = _order_and_tokens(before.end) if before else None
        if began and ended != _order_and_tokens(start.began):
            found = f"(seed, window_blocks), tokens of each dataset: {_order_and_tokens(start.began)}, not {ended}"
            raise TitaniteError(f"{run}: a start continues at token {began:,}, where no step before it ended: {found}")
        last = before
        for number in range(len(start.checksums)):
            last = Step(start, number, last)
            reached[last.end.tokens] = last
            recorded += 1
    steps = []
    while last:
        steps.append(last)
        last = last.before
    if not steps:
        otherwise = f"all {recorded:,} were made void by a resume" if recorded else "is it a run folder?"
        raise TitaniteError(f"{run}: no step of data-parallel rank 0 is recorded; {otherwise}")
    return steps[::-1], recorded - len(steps)


def _order_and_tokens(position: Position) -> tuple[tuple[int, int], dict[str, int]]:
    """What decides the order of the data, and the tokens consumed of each dataset."""
    consumed = {name: tokens for name, tokens in position.consumed.items() if tokens}
    return (position.seed, position.window_blocks), consumed


def _read_rank(run: Path, rank: int) -> dict[str, Start]:
    """The ledger of a data-parallel rank; a branch's after its parent's up to the fork. Raises TitaniteError."""
    own = read_ledger(run / "data" / f"rank-{rank:05}.jsonl")
    parent = read_parent(run)
    if not parent:
        return own
    if not (parent.folder / "config.toml").is_file():
        raise TitaniteError(f"{run}: its parent is not in {parent.folder}: put it, or a link to it, back there")
    starts = {}
    for start_id, start in _read_rank(parent.folder, rank).items():
        before_fork = (parent.tokens - start.began.tokens) // start.tokens_per_step
        if before_fork >= 0:
            starts[start_id] = start._replace(checksums=start.checksums[:before_fork])
    return starts | own


def prove(run: Path) -> list[str]:
    """Check a run as this module's docstring says and return the lines of the proof.

    Raises TitaniteError naming the first step and rank that fails.
    """
    steps, void = trained_steps(run)
    ranks = [_read_rank(run, rank) for rank in range(max(step.start.shape.dp_size for step in steps))]
    reached = _reached(run)
    if len(steps) < reached:
        ledger = f"but rank 0's ledger ends with step {len(steps):,}"
        raise TitaniteError(f"{run}: step {reached:,} was trained, as exit.json says, {ledger}")
    is_cut = len(steps) > max(reached, 1) and None in _recorded(ranks, steps[-1])
    if is_cut:  # killed before all ranks began it
        steps.pop()
    datasets, streams = open_datasets(run, steps)
    rebuilt = 0
    for number, step in enumerate(tqdm(steps, desc="prove", unit=" steps"), start=1):
        recorded = _recorded(ranks, step)
        if None in recorded:
            rank = recorded.index(None)
            raise TitaniteError(f"{run}: rank {rank} has no record of step {number} that fits rank 0's")
        for rank, (own, expected) in enumerate(zip(recorded, checksums(streams, step), strict=True)):
            if own != expected:
                raise TitaniteError(f"{run}: step {number}: rank {rank} was given other tokens than the data has")
        rebuilt += len(recorded)
    end = steps[-1].end
    sizes = sorted({step.start.shape.dp_size for step in steps})
    lines = [
        f"{len(steps):,} steps, {end.tokens:,} tokens, without gap or overlap, on {sizes} data-parallel ranks",
        f"steps made void by a resume, left out: {void:,}; batches rebuilt and found equal: {rebuilt:,}",
    ]
    for dataset in datasets:
        size = dataset.split("train").total_tokens
        epochs, rest = divmod(end.consumed.get(dataset.hash, 0), size)
        seen = f"{rest:,} of its {size:,} tokens, each once"
        if epochs:
            seen = f"each of its {size:,} tokens x {epochs}, and {rest:,} of epoch {epochs + 1}"
        lines.append(f"{dataset.url}: {seen}")
    if is_cut:
        lines.append(f"step {len(steps) + 1} left out: some ranks had not begun it when the run ended")
    return lines + _origins(run)


def _recorded(ranks: Sequence[Mapping[str, Start]], step: Step) -> list[int | None]:
    """The checksum that each rank recorded for a step; None where no record fits rank 0's."""
    found: list[int | None] = []
    for starts in ranks[: step.start.shape.dp_size]:
        own = starts.get(step.start.id)
        if own and own[:3] == step.start[:3] and step.number < len(own.checksums):
            found.append(own.checksums[step.number])
        else:
            found.append(None)
    return found


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
    first, _, stop = steps.partition(":")
    numbers = range(int(first), int(stop or int(first) + 1))
    if not numbers or numbers.start < 1:
        raise argparse.ArgumentTypeError(f"{steps}: must be N or FIRST:STOP, counted from 1, STOP above FIRST")
    return numbers


def list_documents(run: Path, numbers: range) -> Iterator[str]:
    """Yield where each document of the steps `numbers` lies, and the text that was read. Raises TitaniteError."""
    trained, _ = trained_steps(run)
    if numbers[-1] > len(trained):
        raise TitaniteError(f"--steps {numbers[0]}:{numbers.stop}: the run has steps 1 to {len(trained)}")
    steps = trained[numbers[0] - 1 : numbers[-1]]
    datasets, streams = open_datasets(run, steps)
    tokenizer = datasets[0].tokenizer()
    read = lru_cache(64)(Split.read)
    for number, step in zip(numbers, steps, strict=True):
        for sample, (stream, start, seq_len) in enumerate(located(streams, step)):
            split = stream.split
            for block, row, first, stop in stream.documents(start, seq_len):
                shard, of_shard = split.find(block)
                content = read(split, block)
                text = tokenizer.decode(split.ids(content.values[content.offsets[row] :][first:stop]).tolist())
                place = f"{split.files.url}/{shard.file} block {of_shard} row {row} tokens {first}:{stop}"
                yield f"step {number} sample {sample}: {place}: {json.dumps(text, ensure_ascii=False)}"


if __name__ == "__main__":
    main()

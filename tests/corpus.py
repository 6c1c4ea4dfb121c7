"""Small datasets for tests, and what they must deliver, worked out in plain Python."""

import pyarrow as pa
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from config import from_dict
from data.order import derive_key, permutation
from data.prepare import prepare_sources
from data.prepare.options import Options
from data.prepare.output import Output
from data.prepare.readers import documents, plan_units
from data.prepare.sources import list_files
from data.prepare.writer import token_dtype, write_manifest, write_shard
from data.shards import token_type
from data.tokenizer import END_OF_TEXT, Tokenizer


def word_tokenizer(vocab_size):
    """A tokenizer of the words w1, w2, ...; 0 ends a document."""
    words = {END_OF_TEXT: 0} | {f"w{i}": i for i in range(1, vocab_size)}
    raw = RawTokenizer(models.WordLevel(words, unk_token="w1"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return Tokenizer(raw, END_OF_TEXT)


def unique_documents(rng, tokens, longest):
    """Two shards of documents in which every token of `tokens` occurs once; 0 ends a document."""
    documents, rest = [], list(tokens)
    while rest:
        size = rng.randint(1, longest)
        documents.append([*rest[:size], 0])
        rest = rest[size:]
    return [documents[::2], documents[1::2]]


def write_dataset(folder, train, validation=None, vocab_size=1000, block_tokens=40):
    """A dataset whose train shards hold these documents, each a list of token ids."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = word_tokenizer(vocab_size)
    tokenizer.save(folder)
    dtype = token_dtype(vocab_size)
    block_bytes = block_tokens * (2 if dtype == "uint16" else 4)
    written = [
        write_shard(Output(str(folder)), split, number, pa.array(documents, token_type(dtype)), block_bytes)
        for split, shards in (("train", train), ("validation", [validation or []]))
        for number, documents in enumerate(shards)
    ]
    write_manifest(Output(str(folder)), tokenizer, written)
    return folder


def prepare(sources, output, **options):
    """Run data.prepare in this process. Raises what its command prints."""
    return prepare_sources(Options(source=tuple(sources), output=output, **options))


def documents_in(source, keys=("text",), format="text", separator=""):
    """The text of every document, unit after unit."""
    units = plan_units(list_files([str(source)]))
    return [text for unit in units for _, text in documents(unit, keys, format, separator)]


def stored_blocks(folder, split="train"):
    """The documents of every block, read with nothing but pyarrow."""
    blocks = []
    for file in sorted(folder.glob(f"{split}-*.arrow")):
        reader = pa.ipc.open_file(file.read_bytes())
        blocks += [reader.get_batch(i).column(0).to_pylist() for i in range(reader.num_record_batches)]
    return blocks


def expected_stream(blocks, name, seed, window_blocks):
    """(position in its document, token), epoch after epoch, by the definition in data.order."""
    epoch = 0
    while True:
        order = permutation(len(blocks), derive_key(seed, name, epoch)).tolist()
        for window, first in enumerate(range(0, len(order), window_blocks)):
            documents = [document for block in order[first : first + window_blocks] for document in blocks[block]]
            for i in permutation(len(documents), derive_key(seed, name, epoch, window)).tolist():
                yield from enumerate(documents[i])
        epoch += 1


def data_config(*folders, **overrides):
    """A Config for these datasets; overrides as `section__field=value`."""
    values = {
        "data": {"datasets": [str(folder) for folder in folders]},
        "validation": {"enable": False},
    }
    for key, value in overrides.items():
        section, _, field = key.partition("__")
        values.setdefault(section, {})[field] = value
    return from_dict(values)

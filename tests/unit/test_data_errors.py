"""Data that cannot be used: each case a clear error."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from isal import isal_zlib

from config import ConfigError, TitaniteError
from data.files import Cache
from data.loader import DataLoader, validation_batches
from data.shards import DataError, check_datasets, open_dataset, seal
from storage import StoreError
from tests.corpus import data_config, word_tokenizer, write_dataset
from tests.harness import run_ranks

ROWS = [[*range(first + 1, first + 10), 0] for first in range(0, 400, 10)]
DOCUMENTS = [ROWS[:20], ROWS[20:]]


@pytest.fixture
def folder(tmp_path):
    return write_dataset(tmp_path / "dataset", DOCUMENTS, validation=[[5, 6, 0]])


def check(*folders, **overrides):
    check_datasets(data_config(*folders, **{"training__seq_len": 8, **overrides}))


def change_manifest(folder, **values):
    file = folder / "manifest.json"
    changed = {key: value for key, value in json.loads(file.read_text()).items() if key != "sha256"} | values
    content = json.dumps(changed).removesuffix("}").encode()
    file.write_bytes(content + seal(content))


def damage(file, at, bits=1):
    content = bytearray(file.read_bytes())
    content[at] ^= bits
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: shutil.rmtree(d), r"manifest\.json: missing\. `python -m data\.prepare .* makes a dataset"),
        (lambda d: (d / "manifest.json").write_text("{}"), r"manifest\.json: not a manifest: KeyError 'format'"),
        (lambda d: change_manifest(d, version=2), r"format titanite-tokens 2; this code reads titanite-tokens 3"),
        (lambda d: (d / "train-00001.arrow").unlink(), r"train-00001\.arrow: has 0 bytes, the manifest says \d+"),
        (lambda d: damage(d / "blocks.arrow", 200), r"blocks\.arrow: is damaged, its checksum does not match"),
        (lambda d: word_tokenizer(999).save(d), r"its tokenizer\.json .*is not the one that made the data"),
        (lambda d: (d / "tokenizer.json").unlink(), r"tokenizer\.json: missing"),
    ],
)
def test_unusable_folder(folder, change, message):
    check(folder, validation__enable=True)
    change(folder)
    with pytest.raises(TitaniteError, match=message):
        check(folder)


def test_any_flipped_bit_of_a_manifest_is_found(folder):
    """It would be another dataset, which a resume begins at its first token, or the same with a shard less."""
    file = folder / "manifest.json"
    sound = file.read_bytes()
    for bit in range(0, 8 * len(sound), 29):  # in all places of a byte
        file.write_bytes(sound)
        damage(file, bit // 8, 1 << bit % 8)
        with pytest.raises(DataError, match=r"manifest\.json: (is damaged|not a manifest|format)"):
            open_dataset(str(folder))


def test_combinations_that_do_not_fit(folder, tmp_path):
    other = write_dataset(tmp_path / "other", DOCUMENTS, vocab_size=900)
    with pytest.raises(DataError, match=r"another tokenizer .* prepare one of them again .* as --tokenizer"):
        check(folder, other)
    with pytest.raises(DataError, match="two folders hold the same dataset"):
        check(folder, shutil.copytree(folder, tmp_path / "copy"))
    with pytest.raises(DataError, match=r"400 training tokens are too few .* training\.seq_len = 400"):
        check(folder, training__seq_len=400)
    bare = write_dataset(tmp_path / "bare", DOCUMENTS[:1])
    check(bare, validation__enable=True)  # which holds nothing out
    with pytest.raises(DataError, match="has no validation documents"):
        check(folder, validation__datasets=[str(bare)])


def test_a_run_goes_on_only_with_its_own_tokenizer(folder, tmp_path):
    other = write_dataset(tmp_path / "other", DOCUMENTS, vocab_size=999)
    shutil.copy(folder / "tokenizer.json", tmp_path)
    (tmp_path / "model.json").touch()
    settings = {"training__seq_len": 8, "run__folder": str(tmp_path)}
    DataLoader(data_config(folder, **settings), 0, 1).close()
    with pytest.raises(ConfigError, match=r"this run began with another tokenizer than .*other was made with"):
        DataLoader(data_config(other, **settings), 0, 1)


def test_checking_imports_neither_torch_nor_transformers(folder):
    code = (
        "import sys; from data.shards import check_datasets; from config import from_dict;"
        f"check_datasets(from_dict({{'data': {{'datasets': [{str(folder)!r}]}}, 'training': {{'seq_len': 8}}}}));"
        "import data.prepare, tools.audit; sys.exit(bool({'torch', 'transformers'} & {*sys.modules}))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)


def test_token_above_the_vocabulary_is_named(folder):
    change_manifest(folder, vocab_size=399)  # ids go up to 399
    split = open_dataset(str(folder)).splits["train"]
    split.read(8)
    with pytest.raises(DataError, match=r"train-00001\.arrow, block 4, row 3: token id 399 .* vocab_size 399"):
        split.read(9)


# ---------------------------------------------------------------- bad blocks


def replace_by_folder(file, at):
    """As where a disk is away, it says nothing of the data."""
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("change", "prefetch_steps", "error", "message"),
    [
        (damage, 0, DataError, r"is damaged, its checksum does not match \(block 2\)"),
        (
            lambda file, at: os.truncate(file, at),
            2,
            DataError,
            r"is cut short, \d+ of \d+ bytes missing \(block [234]\)",
        ),
        (lambda file, at: file.unlink(), 2, DataError, r"missing \(block \d\)"),
        (replace_by_folder, 0, StoreError, ""),
    ],
)
def test_a_bad_block_stops_the_run_and_is_named(folder, change, prefetch_steps, error, message):
    split = open_dataset(str(folder)).splits["train"]
    loader = DataLoader(data_config(folder, training__seq_len=8, data__prefetch_steps=prefetch_steps), 0, 1)
    change(folder / split.find(7)[0].file, int(split.offset[7] + split.size[7]) - 20)  # among its tokens
    for _ in range(2):  # and the error stays
        with pytest.raises(error, match=rf"train-00001\.arrow: {message}"):
            loader.next_step()
    loader.close()


def test_held_out_documents_without_a_pair_of_tokens_are_named(tmp_path):
    bare = write_dataset(tmp_path / "bare", DOCUMENTS, validation=[[0]])
    with pytest.raises(DataError, match=r"bare'\]: no held-out document has two tokens"):
        next(validation_batches(data_config(bare, training__seq_len=8), 0, 1))


def test_blocks_that_are_held_keep_no_file_open(folder):
    """A rank holds two windows of blocks of every dataset, thousands where there are many."""
    split, before = open_dataset(str(folder)).splits["train"], len(os.listdir("/proc/self/fd"))
    held = [split.read(block) for block in range(10)]
    assert len(os.listdir("/proc/self/fd")) == before, held


def refusals(configs_of_ranks):
    """The settings that this rank refuses, of each pair of configs."""
    said = []
    for configs in configs_of_ranks:
        loader = DataLoader(configs[dist.get_rank()], dist.get_rank(), dist.get_world_size())
        with pytest.raises(ConfigError) as caught:
            loader.check_ranks()
        assert caught.value.agreed
        said.append(str(caught.value).partition(":")[0])
        loader.close()
    return said


def test_ranks_with_other_settings_or_datasets_do_not_start(folder, tmp_path):
    """Folders may have other names on each node, and settings of its own count there."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    other = write_dataset(tmp_path / "other", DOCUMENTS[:1])
    for name in ("yes", "no"):
        (tmp_path / name).write_text(name)

    def config(data, **overrides):
        return data_config(data, training__seq_len=8, validation__datasets=[str(folder)], **overrides)

    own = "data__cache_folder", "run__folder", "run__outputs"
    node = dict.fromkeys(own, "/tmp/node") | {"data__cache_gb": 2}
    cases = {
        "validation.interval": (config(folder, **node), config(copy, validation__interval=7)),
        "validation.answers": [config(folder, validation__answers=[str(tmp_path / name)]) for name in ("yes", "no")],
        "data.datasets": (config(folder), config(other)),
    }
    assert run_ranks(2, refusals, [*cases.values()]) == [[*cases], [*cases]]


def test_a_cache_folder_that_went_away_is_named(tmp_path):
    cache = Cache(tmp_path / "cache", 1000)
    cache.folder.rmdir()
    with pytest.raises(StoreError, match=r"data.cache_folder = .*/cache: cannot be used: No such file"):
        cache.map("0123456789abcdef", lambda: b"tokens", 6, isal_zlib.crc32(b"tokens"))

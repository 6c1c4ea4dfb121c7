"""Data that cannot be used: each case a clear error."""

import json
import os
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch.distributed as dist
from isal import isal_zlib

from config import ConfigError, TitaniteError
from data.files import Cache
from data.loader import DataLoader, validation_batches
from data.shards import DataError, check_datasets, open_dataset, seal
from storage import DamagedError, StoreError
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
    version = 8 * sound.index(b'"version": ')
    for bit in [*range(0, 8 * len(sound), 29), *range(version, version + 8 * 12)]:  # in all places of a byte
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
    check(other, validation__enable=True)  # which holds nothing out
    bare = write_dataset(tmp_path / "bare", DOCUMENTS[:1])
    check(bare, validation__enable=True, validation__datasets=[str(folder)])
    with pytest.raises(DataError, match="has no validation documents"):
        check(folder, validation__datasets=[str(bare)])


def test_a_run_goes_on_only_with_its_own_tokenizer(folder, tmp_path):
    other = write_dataset(tmp_path / "other", DOCUMENTS, vocab_size=999)
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(folder / "tokenizer.json", run)
    settings = {"training__seq_len": 8, "run__folder": str(run)}
    DataLoader(data_config(other, **settings), 0, 1).close()  # what is no run, train() will say
    (run / "model.json").touch()
    DataLoader(data_config(folder, **settings), 0, 1).close()
    with pytest.raises(ConfigError, match=r"run: this run began with another tokenizer than .*other was made with"):
        DataLoader(data_config(other, **settings), 0, 1)


def test_checking_imports_no_torch(folder):
    code = (
        "import sys; from data.shards import check_datasets; from config import from_dict;"
        f"check_datasets(from_dict({{'data': {{'datasets': [{str(folder)!r}]}}, 'training': {{'seq_len': 8}}}}));"
        "import data.prepare, tools.audit; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)


@pytest.mark.parametrize("vocab_size", [395, 399])
def test_token_above_the_vocabulary_is_named(folder, vocab_size):
    change_manifest(folder, vocab_size=vocab_size)  # ids go up to 399
    split = open_dataset(str(folder)).splits["train"]
    split.read(8)
    message = rf"train-00001\.arrow, block 4, row 3: token id 399 is not below vocab_size {vocab_size}"
    with pytest.raises(DataError, match=message):
        split.read(9)


# ---------------------------------------------------------------- bad blocks


@pytest.mark.parametrize(
    ("change", "prefetch_steps", "message"),
    [
        (damage, 0, r"is damaged, its checksum does not match \(block 2\)"),
        (lambda file, at: os.truncate(file, at), 2, r"is cut short, \d+ of \d+ bytes missing \(block [234]\)"),
        (lambda file, at: file.unlink(), 2, r"missing \(block \d\)"),
    ],
)
def test_a_bad_block_stops_the_run_and_is_named(folder, change, prefetch_steps, message):
    split = open_dataset(str(folder)).splits["train"]
    loader = DataLoader(data_config(folder, training__seq_len=8, data__prefetch_steps=prefetch_steps), 0, 1)
    change(folder / split.find(7)[0].file, int(split.offset[7] + split.size[7]) - 20)  # among its tokens
    for _ in range(2):  # and the error stays
        with pytest.raises(DataError, match=rf"train-00001\.arrow: {message}"):
            loader.next_step()
    loader.close()


def test_what_is_no_file_is_named(folder):
    """As where a disk is away, it says nothing of the data."""
    (folder / "train-00001.arrow").unlink()
    (folder / "train-00001.arrow").mkdir()
    with pytest.raises(StoreError, match=r"train-00001\.arrow: ") as caught:
        open_dataset(str(folder)).splits["train"].read(9)
    assert not isinstance(caught.value, DamagedError)


def test_held_out_documents_without_a_pair_of_tokens_are_named(tmp_path):
    bare = write_dataset(tmp_path / "bare", DOCUMENTS, validation=[[0]])
    with pytest.raises(DataError, match=r"bare'\]: no held-out document has two tokens"):
        next(validation_batches(data_config(bare, training__seq_len=8), 0, 1))


def test_blocks_that_are_held_keep_no_file_open(folder):
    """A rank holds two windows of blocks of every dataset, thousands where there are many."""
    split, before = open_dataset(str(folder)).splits["train"], len(os.listdir("/proc/self/fd"))
    held = [split.read(block) for block in range(10)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(chain.from_iterable(block.values for block in held)) == list(chain.from_iterable(ROWS))


def refusals(configs_of_ranks):
    """What this rank says to each pair of configs."""
    said = []
    for configs in configs_of_ranks:
        loader = DataLoader(configs[dist.get_rank()], dist.get_rank(), dist.get_world_size())
        try:
            loader.check_ranks()
            said.append("")
        except ConfigError as error:
            said.append(str(error) if error.agreed else "by one rank only")
        loader.close()
    return said


def test_ranks_with_other_settings_or_datasets_do_not_start(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    other = write_dataset(tmp_path / "other", DOCUMENTS[:1], validation=[[5, 6, 0]])
    for name in ("yes", "no"):
        (tmp_path / name).write_text(name)

    def config(data, answers="yes", **overrides):
        given = {"training__seq_len": 8, "validation__answers": [str(tmp_path / answers)]} | overrides
        return data_config(data, validation__datasets=[str(folder)], **given)

    own = ("data__cache_folder", "run__folder", "run__outputs")
    nodes = [dict.fromkeys(own, f"/tmp/node-{i}") | {"data__cache_gb": 1 + i} for i in range(2)]
    cases = {
        "": (config(folder, **nodes[0]), config(copy, **nodes[1])),
        "validation.answers": (config(folder), config(folder, "no")),
        "optimizer.lr": (config(folder), config(folder, optimizer__lr=0.5)),
        "data.datasets": (config(folder), config(other)),
    }
    said = run_ranks(2, refusals, [*cases.values()])
    assert [[message.partition(":")[0] for message in own] for own in said] == [[*cases], [*cases]]


def test_a_cache_folder_that_went_away_is_named(tmp_path):
    cache, content = Cache(tmp_path / "cache", 1000), b"tokens"
    checksum = isal_zlib.crc32(content)
    assert cache.map("0123456789abcdef", lambda: content, len(content), checksum) == content
    shutil.rmtree(cache.folder)
    with pytest.raises(StoreError, match=r"data.cache_folder = .*/cache: cannot be used: No such file"):
        cache.map("fedcba9876543210", lambda: content, len(content), checksum)

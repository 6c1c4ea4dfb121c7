"""Data that cannot be used: each case a clear error; a bad block masked in place when asked."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from unittest.mock import Mock

import fsspec
import pytest
import torch
import torch.distributed as dist
from isal import isal_zlib

from config import ConfigError, TitaniteError, to_toml
from data import place
from data.loader import IGNORED, DataLoader, validation_batches
from data.shards import BadBlockError, DataError, check_datasets, open_dataset, seal
from data.storage import Cache, LocalFolder, StorageError, open_folder
from data.tokenizer import END_OF_TEXT, fingerprint, load_tokenizer
from tests.corpus import data_config, expected_stream, stored_blocks, word_tokenizer, write_dataset
from tests.harness import run_ranks
from tools.audit import prove

DOCUMENTS = [
    [[*range(10 * i + 1, 10 * i + 10), 0] for i in range(20)],
    [[*range(10 * i + 1, 10 * i + 10), 0] for i in range(20, 40)],
]


@pytest.fixture
def folder(tmp_path):
    return write_dataset(tmp_path / "dataset", DOCUMENTS, validation=[[5, 6, 0]])


def check(*folders, **overrides):
    check_datasets(data_config(*folders, **{"training__seq_len": 8, **overrides}))


def change_manifest(folder: Path, **values) -> None:
    file = folder / "manifest.json"
    changed = {key: value for key, value in json.loads(file.read_text()).items() if key != "sha256"} | values
    content = json.dumps(changed).removesuffix("}").encode()
    file.write_bytes(content + seal(content))


def damage(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def middle_of(folder: Path, block: int) -> tuple[Path, int]:
    """A place among the tokens of a train block."""
    split = open_dataset(str(folder)).splits["train"]
    file = folder / split.find(block)[0].file
    return file, int(split.offset[block] + split.size[block]) - 20


def test_sound_data_passes(folder):
    check(folder, validation__enable=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: shutil.rmtree(d), r"manifest\.json: is missing\. Make a dataset with: python -m data\.prepare"),
        (lambda d: (d / "manifest.json").write_text("{}"), r"manifest\.json: not a manifest: KeyError 'format'"),
        (lambda d: (d / "manifest.json").write_text("{"), r"manifest\.json: not a manifest: JSONDecodeError"),
        (lambda d: change_manifest(d, version=9), r"version 9; this code reads titanite-tokens version 2"),
        (lambda d: (d / "train-00001.arrow").unlink(), r"train-00001\.arrow: is missing, the manifest says \d+ bytes"),
        (lambda d: (d / "train-00000.arrow").write_bytes(b"x"), r"train-00000\.arrow: has 1 bytes, the manifest says"),
        (lambda d: damage(d / "blocks.arrow", 200), r"blocks\.arrow: is damaged, its checksum does not match"),
        (lambda d: (d / "blocks.arrow").unlink(), r"blocks\.arrow: is missing"),
        (lambda d: word_tokenizer(999).save(d), r"tokenizer\.json: fingerprint \w+, but the data was made with \w+"),
        (lambda d: (d / "tokenizer.json").unlink(), r"tokenizer\.json: is missing"),
    ],
)
def test_unusable_folder(folder, change, message):
    change(folder)
    with pytest.raises(DataError, match=message):
        check(folder)


def test_any_flipped_bit_of_a_manifest_is_found(folder):
    """It would be another dataset, which a resume begins at its first token, or the same with a shard less."""
    file = folder / "manifest.json"
    sound = file.read_bytes()
    for bit in range(8 * len(sound)):
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with pytest.raises(DataError, match=r"manifest\.json: (is damaged|not a manifest|format)"):
            open_dataset(str(folder))


def test_a_manifest_of_version_1_had_no_checksum(folder):
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text()) | {"version": 1}
    del manifest["sha256"]
    file.write_text(json.dumps(manifest, indent=1))
    check(folder)


def test_combinations_that_do_not_fit(folder, tmp_path):
    other = write_dataset(tmp_path / "other", DOCUMENTS, vocab_size=900)
    with pytest.raises(DataError, match=r"another tokenizer .* prepare one of them again .* as --tokenizer"):
        check(folder, other)
    with pytest.raises(DataError, match="two folders hold the same dataset"):
        check(folder, shutil.copytree(folder, tmp_path / "copy"))
    with pytest.raises(DataError, match=r"400 training tokens are too few .* training\.seq_len \+ 1 = 401"):
        check(folder, training__seq_len=400)
    with pytest.raises(DataError, match="has no validation documents"):
        check(other, validation__enable=True)
    bare = write_dataset(tmp_path / "bare", DOCUMENTS[:1])
    check(bare, validation__enable=True, validation__datasets=[str(folder)])
    with pytest.raises(DataError, match="has no validation documents"):
        check(folder, validation__datasets=[str(bare)])
    with pytest.raises(DataError, match=r"data\.tokenizer = .*other.*but the data in .*dataset was made with"):
        check(folder, data__tokenizer=str(other))
    check(folder, data__tokenizer=str(folder / "tokenizer.json"))
    with pytest.raises(TitaniteError, match="no such tokenizer file"):
        check(folder, data__tokenizer=str(tmp_path / "nothing"))
    with pytest.raises(StorageError, match="cannot be opened"):
        check("nosuchprotocol://x/y")


def test_a_run_goes_on_only_with_its_own_tokenizer(folder, tmp_path):
    other = write_dataset(tmp_path / "other", DOCUMENTS, vocab_size=999)
    run = tmp_path / "run"
    run.mkdir()
    (run / "model.json").touch()

    def start(data: Path) -> None:
        loader = DataLoader(data_config(data, training__seq_len=8, run__folder=str(run)), 0, 1)
        loader.tokenizer.save(run)
        loader.close()

    start(folder)
    saved = {file: (run / file).read_text() for file in ("tokenizer.json", "tokenizer_config.json")}
    start(folder)
    text = json.dumps(json.loads(saved["tokenizer.json"]), indent=1)  # as another version of tokenizers might write it
    (folder / "tokenizer.json").write_text(text)
    change_manifest(folder, tokenizer=fingerprint(text.encode(), END_OF_TEXT))
    start(folder)
    with pytest.raises(ConfigError, match=r"run: this run began with tokenizer \w+, but the data in .*other"):
        start(other)
    assert {file: (run / file).read_text() for file in saved} == saved
    assert {path.name for path in run.iterdir()} == {*saved, "model.json"}
    (run / "model.json").unlink()  # what is no run, train() will say
    start(other)


def test_a_full_disk_leaves_a_whole_tokenizer(folder):
    """A run could not go on with half of one."""
    before, limits = load_tokenizer(folder).fingerprint, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            word_tokenizer(1000).save(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load_tokenizer(folder).fingerprint == before


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
    message = rf"train-00001\.arrow, block 4, row 3: token id {vocab_size} is not below .* size {vocab_size}"
    with pytest.raises(DataError, match=message):
        split.read(9)


# ---------------------------------------------------------------- bad blocks


@pytest.mark.parametrize("prefetch_steps", [0, 2])
@pytest.mark.parametrize("kind", ["flipped", "short", "missing"])
def test_a_bad_block_stops_the_run_and_is_named(folder, kind, prefetch_steps):
    file, place = middle_of(folder, 7)
    config = data_config(folder, training__seq_len=8, data__prefetch_steps=prefetch_steps)
    loader = DataLoader(config, 0, 1)
    if kind == "flipped":
        damage(file, place)
        message = "block 2: is damaged, its checksum does not match"
    elif kind == "short":
        file.write_bytes(file.read_bytes()[:place])
        message = r"block 2: is cut short, 20 of \d+ bytes missing|block [34]: is cut short, \d+ of \d+ bytes missing"
    else:
        file.unlink()
        message = r"block \d: is missing"
    for _ in range(2):  # and the error stays
        with pytest.raises(BadBlockError, match=rf"train-00001\.arrow, {message}"):
            loader.next_step()
    loader.close()


@pytest.mark.parametrize("kind", ["too many open files", "not readable"])
def test_what_says_nothing_about_the_data_is_no_bad_block(folder, kind):
    """It stops the run even when bad blocks are masked: the data may be sound."""
    loader = DataLoader(data_config(folder, training__seq_len=8, data__on_bad_block="mask"), 0, 1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    message = r"dataset/train-0000\d\.arrow: cannot be read: "
    try:
        if kind == "too many open files":
            message += "Too many open files; raise the limit with `ulimit -n`"
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        else:
            message += "Too many levels of symbolic links$"  # unlike permissions, this refuses root, too
            for file in (*folder.glob("train-*.arrow"), folder / "manifest.json"):
                file.unlink()
                file.symlink_to(file)
            with pytest.raises(StorageError, match=r"manifest\.json: cannot be read: Too many levels"):
                open_dataset(str(folder))
        with pytest.raises(StorageError, match=message):
            loader.next_step()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        loader.close()


def test_blocks_that_are_held_keep_no_file_open(folder):
    """A rank holds two windows of blocks of every dataset, thousands where there are many."""
    split, before = open_dataset(str(folder)).splits["train"], len(os.listdir("/proc/self/fd"))
    held = [split.read(block) for block in range(10)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert [block.values.tolist() for block in held] == [
        [token for document in block for token in document] for block in stored_blocks(folder)
    ]


def tokens_and_labels(loader, steps):
    batches = [batch for _ in range(steps) for batch in loader.next_step()]
    return [torch.stack(field).flatten().tolist() for field in zip(*[batch[:2] for batch in batches], strict=True)]


@pytest.mark.parametrize("kind", ["flipped", "missing"])
def test_a_masked_block_keeps_its_place(folder, kind):
    """The order is that of the sound data; the bad block's tokens are zeros that are never labels."""
    blocks = stored_blocks(folder)
    name = open_dataset(str(folder)).hash
    bad = {token for document in blocks[7] for token in document if token}
    file, place = middle_of(folder, 7)
    if kind == "missing":
        file.unlink()
        bad = {token for block in blocks[5:] for document in block for token in document if token}
    else:
        damage(file, place)
    config = data_config(folder, training__seq_len=8, training__local_batch_size=5, data__on_bad_block="mask")
    loader = DataLoader(config, 0, 1)
    tokens, labels = tokens_and_labels(loader, 12)
    state = loader.state_dict()
    loader.close()
    assert state["masked"] == {name: [7] if kind == "flipped" else [5, 6, 7, 8, 9]}

    stream = list(islice(expected_stream(blocks, name, 0, 16), 481))
    owner = {token: token in bad for block in blocks for document in block for token in document}
    is_bad, document_bad = [], False
    for token, _ in reversed(stream):  # a document's 0 follows its tokens: look at the one before
        is_bad.append(owner[token] if token else None)
    is_bad.reverse()
    for i, (token, _) in enumerate(stream):
        if token == 0:
            is_bad[i] = is_bad[i - 1] if i else document_bad
    for i in range(480):
        assert tokens[i] == (0 if is_bad[i] else stream[i][0])
        assert labels[i] == (IGNORED if is_bad[i + 1] else stream[i + 1][0])


def test_masked_blocks_stay_masked_after_a_resume(folder):
    """Also when the block is sound again: the order and the weights must not depend on it."""
    file, place = middle_of(folder, 7)
    config = data_config(folder, training__seq_len=8, data__on_bad_block="mask")
    damage(file, place)
    loader = DataLoader(config, 0, 1)
    loader.next_step()
    state = loader.state_dict()
    expected = tokens_and_labels(loader, 6)
    loader.close()
    damage(file, place)  # flips the bit back
    loader = DataLoader(config, 0, 1)
    loader.load_state_dict(json.loads(json.dumps(state)))
    assert tokens_and_labels(loader, 6) == expected
    loader.close()
    strict = DataLoader(data_config(folder, training__seq_len=8), 0, 1)
    with pytest.raises(DataError, match="was trained with masked blocks"):
        strict.load_state_dict(state)
    strict.close()


@pytest.mark.parametrize("window_blocks", [16, 4])
def test_a_block_found_bad_while_its_sound_copy_is_in_use_is_masked_there_too(folder, tmp_path, window_blocks):
    """All is one window, and the next epoch is read ahead; or the next window, and more is found bad where the one in
    use is read again. What the state says is what is trained, and is proven."""
    sizes = {"training__seq_len": 8, "training__local_batch_size": 5, "data__window_blocks": window_blocks}
    config = data_config(folder, data__on_bad_block="mask", **sizes)
    run, file = tmp_path / "run", folder / "train-00001.arrow"
    run.mkdir()
    (run / "config.toml").write_text(to_toml(config))
    loader = DataLoader(config, 0, 1)
    loader.open_ledger(run)
    loader.next_step()
    content = file.read_bytes()
    file.unlink()
    while not loader.state_dict()["masked"]:
        loader.next_step()
    state = loader.state_dict()
    rest = tokens_and_labels(loader, 5)
    loader.close()
    with pytest.raises(BadBlockError, match=r"train-00001\.arrow, block \d: is missing"):
        prove(run)  # the first steps had read it
    file.write_bytes(content)
    assert prove(run)[-1].startswith(str(folder))
    again = DataLoader(config, 0, 1)
    again.load_state_dict(state)
    assert tokens_and_labels(again, 5) == rest
    again.close()


def test_a_dataset_that_comes_back_into_the_mixture_is_still_masked(folder, tmp_path):
    other = write_dataset(tmp_path / "other", [DOCUMENTS[1]])
    damage(*middle_of(folder, 7))
    state = None
    for folders in ((folder,), (other,), (other, folder)):
        loader = DataLoader(data_config(*folders, training__seq_len=8, data__on_bad_block="mask"), 0, 1)
        if state:
            loader.load_state_dict(json.loads(json.dumps(state)))
        loader.next_step()
        state = loader.state_dict()
        assert state["masked"] == {open_dataset(str(folder)).hash: [7]}
        loader.close()
        if folder not in folders:
            damage(*middle_of(folder, 7))  # sound again


@pytest.mark.parametrize("max_samples", [0, 5])
def test_validation_leaves_a_bad_block_out_where_bad_blocks_are_masked(tmp_path, monkeypatch, max_samples):
    held_out = [document for documents in DOCUMENTS for document in documents]
    folder = write_dataset(tmp_path / "dataset", DOCUMENTS, validation=held_out)
    split = open_dataset(str(folder)).splits["validation"]
    settings = {"training__seq_len": 8, "training__local_batch_size": 5, "validation__max_samples": max_samples}
    config = data_config(folder, data__on_bad_block="mask", **settings)

    def labels():
        return torch.cat([batch.labels for batch in validation_batches(config, 0, 1)])

    sound = labels()
    bad = torch.tensor([token for document in stored_blocks(folder, "validation")[4] for token in document if token])
    damage(folder / "validation-00000.arrow", int(split.offset[4] + split.size[4]) - 20)
    left = labels()
    hidden = sound != left
    assert hidden.any()
    assert (left[hidden] == IGNORED).all()
    assert set(sound[hidden].tolist()) <= {0, *bad.tolist()}
    assert not torch.isin(left, bad).any()
    with pytest.raises(BadBlockError, match=r"validation-00000\.arrow, block 4: is damaged"):
        list(validation_batches(data_config(folder, **settings), 0, 1))
    monkeypatch.setattr("data.loader.MAX_BAD_BLOCKS", 0)
    with pytest.raises(DataError, match="1 blocks are bad, more than 0"):
        labels()


def test_damaged_lengths_cannot_be_masked(folder):
    damage(*middle_of(folder, 7))
    damage(folder / "train-00001.lengths", 5)
    loader = DataLoader(data_config(folder, training__seq_len=8, data__on_bad_block="mask"), 0, 1)
    with pytest.raises(DataError, match=r"train-00001\.lengths: is damaged.* block 2 cannot be masked"):
        loader.next_step()
    loader.close()


def rank_with_own_copy(folders):
    rank, size = dist.get_rank(), dist.get_world_size()
    config = data_config(
        Path(folders[rank]), training__seq_len=8, training__local_batch_size=2, data__on_bad_block="mask"
    )
    loader = DataLoader(config, rank, size)
    out = [tokens_and_labels(loader, 8), loader.state_dict()]
    loader.close()
    return out


def test_ranks_agree_on_a_block_that_is_bad_on_one_node_only(folder, tmp_path):
    copies = [shutil.copytree(folder, tmp_path / f"node{rank}") for rank in range(3)]
    damage(*middle_of(copies[1], 7))
    results = run_ranks(3, rank_with_own_copy, [str(copy) for copy in copies])
    assert all(state == results[0][1] for _, state in results)
    assert list(results[0][1]["masked"].values()) == [[7]]
    bad = {token for document in stored_blocks(folder)[7] for token in document if token}
    assert not any(bad & set(labels) for (_, labels), _ in results)


def refusals(cases):
    """What this rank says in each case, (configs of the ranks, what is said)."""
    said = []
    for configs, _ in cases:
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

    def config(*folders, **overrides):
        return data_config(*folders, training__seq_len=8, **overrides)

    def names(*folders):
        return [str(folder) for folder in folders]

    def of_node(copy, name):
        places = {"data__cache_folder": name, "run__folder": name, "run__outputs": name}
        places |= {"data__tokenizer": str(copy), "validation__datasets": names(copy)}
        return places | {"data__cache_gb": 1 + int(name)}

    one, number = config(folder), "number of {}.datasets: {} on rank 1, {} on rank 0; every node needs the same"
    cases = [
        ((config(folder, **of_node(folder, "0")), config(copy, **of_node(copy, "1"))), ""),
        ((one, config(folder, data__mask_documents=True)), "data.mask_documents: true on rank 1, false on rank 0"),
        ((one, config(folder, data__on_bad_block="mask")), 'data.on_bad_block: "mask" on rank 1, "stop" on rank 0'),
        ((one, config(folder, validation__max_samples=7)), "validation.max_samples: 7 on rank 1, 256 on rank 0"),
        ((one, config(folder, optimizer__lr=0.5)), "optimizer.lr: 0.5 on rank 1, 0.0003 on rank 0"),
        ((config(folder, other), config(other)), number.format("data", 1, 2)),
        ((config(folder), config(folder, other)), number.format("data", 2, 1)),
        ((config(folder, other), config(other, copy)), f"dataset {other}: "),
        (
            (
                config(folder, validation__datasets=names(other)),
                config(folder, validation__datasets=names(copy, other)),
            ),
            number.format("validation", 2, 1),
        ),
        (
            (config(folder, validation__datasets=names(other)), config(folder, validation__datasets=names(copy))),
            f"dataset {copy}: ",
        ),
    ]
    first, second = run_ranks(2, refusals, cases)
    assert first == second
    for said, (_, expected) in zip(first, cases, strict=True):
        assert said.startswith(expected)
        assert bool(said) == bool(expected)


def refusal_of_other_shares(config):
    """What this rank says where rank 1 rounds otherwise."""
    if dist.get_rank():
        place.math = Mock(fsum=lambda weights: sum(weights) * (1 + 2**-52))
    return refusals([((config, config), "")])


def test_ranks_with_other_shares_do_not_start(folder, tmp_path):
    """The same config, and yet another order of the samples."""
    other = write_dataset(tmp_path / "other", DOCUMENTS[:1])
    config = data_config(folder, other, data__weights=[0.75, 0.25], training__seq_len=8)
    said = run_ranks(2, refusal_of_other_shares, config)
    assert said[0] == said[1]
    assert re.fullmatch(r"data\.weights, as shares: \[0\.74\d+, .* on rank 1, \[0\.75, 0\.25\] on rank 0; .*", *said[0])


@pytest.mark.parametrize("key", ["data__datasets", "validation__datasets"])
def test_a_file_that_is_missing_or_cut_is_found_before_the_start(folder, tmp_path, key):
    """Also of data that is read at the first validation only."""
    copy = shutil.copytree(write_dataset(tmp_path / "other", DOCUMENTS[::-1], validation=[[7, 0]]), tmp_path / "copy")
    file = copy / "validation-00000.arrow"
    for change in (lambda: file.write_bytes(file.read_bytes()[:-9]), file.unlink):
        change()
        named = {key: [str(folder), str(copy)]} if key == "data__datasets" else {key: [str(copy)]}
        with pytest.raises(DataError, match=rf"{file}: (has \d+ bytes|is missing), the manifest says"):
            check(folder, **named)


def test_no_place_is_refused_and_the_root_is_the_root():
    with pytest.raises(StorageError, match="'': must be a folder or a URL"):
        open_dataset("", data_config().data)
    assert open_folder("/", data_config().data).url == "/"


def test_the_start_asks_once_for_the_size_of_a_shard(folder, monkeypatch):
    """Every rank does, of tens of thousands of files."""
    asked, ask = [], Path.stat
    monkeypatch.setattr(Path, "stat", lambda path, **options: asked.append(path.name) or ask(path, **options))
    check(folder)
    assert asked == ["train-00000.arrow", "train-00001.arrow", "validation-00000.arrow"]


def test_a_remote_dataset_is_to_be_made_here_and_copied():
    """data.prepare writes to no URL."""
    with pytest.raises(
        DataError, match=r"is missing\. Make a dataset with: .* --output FOLDER, and copy it to memory://x"
    ):
        check("memory://x/nothing")


def test_a_server_that_knows_no_ranges_is_named_and_nothing_is_masked(folder, tmp_path, monkeypatch):
    """Its answers hold the block, and more: the data is sound."""
    system = fsspec.filesystem("memory")
    for file in folder.iterdir():
        system.pipe_file(f"/ranges/{file.name}", file.read_bytes())
    original = type(system).cat_file
    monkeypatch.setattr(type(system), "cat_file", lambda self, path, start=None, end=None: original(self, path))
    settings = {"data__cache_folder": str(tmp_path / "cache"), "data__on_bad_block": "mask", "training__seq_len": 8}
    loader = DataLoader(data_config("memory://ranges", **settings), 0, 1)
    with pytest.raises(StorageError, match=r"memory://ranges/train-0000\d\.arrow: the server sent more than"):
        loader.next_step()
    assert not loader.state_dict()["masked"]
    loader.close()


def test_a_start_opens_each_dataset_once(folder, tmp_path, monkeypatch):
    held_out, read, original = shutil.copytree(folder, tmp_path / "held_out"), [], LocalFolder.read
    monkeypatch.setattr(LocalFolder, "read", lambda self, name: read.append((self.url, name)) or original(self, name))
    DataLoader(data_config(folder, training__seq_len=8, validation__datasets=[str(held_out)]), 0, 1).close()
    assert [url for url, name in read if name == "manifest.json"] == [str(folder), str(held_out)]


def test_errors_are_ones_that_users_see_without_traceback():
    assert issubclass(DataError, TitaniteError)
    assert issubclass(StorageError, TitaniteError)


def test_a_cache_folder_that_went_away_is_named(tmp_path: Path) -> None:
    cache, content = Cache(tmp_path / "cache", 1000), b"tokens"
    checksum = isal_zlib.crc32(content)
    assert cache.map("0123456789abcdef", lambda: content, len(content), checksum) == content
    shutil.rmtree(cache.folder)
    with pytest.raises(StorageError, match=r"data.cache_folder = .*/cache: cannot be used: No such file"):
        cache.map("fedcba9876543210", lambda: content, len(content), checksum)


def test_more_bad_blocks_than_an_accident_makes_stop_the_run(folder, monkeypatch):
    monkeypatch.setattr("data.loader.MAX_BAD_BLOCKS", 1)
    loader = DataLoader(data_config(folder, training__seq_len=8, data__on_bad_block="mask"), 0, 1)
    (folder / "train-00001.arrow").unlink()
    with pytest.raises(DataError, match=r"\d+ blocks are bad, more than 1; repair the data"):
        all(loader.next_step() for _ in range(60))
    loader.close()

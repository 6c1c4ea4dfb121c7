"""Config: precedence, types, errors that name the key, the value and what is allowed; what train.py refuses."""

import dataclasses
import re
import shlex
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

import config as settings
import train
from config import Config, ConfigError, TitaniteError, Training, load_config, to_toml
from models import find_model
from models.llama import FLAVORS
from models.llama.model import LlamaConfig
from optim import check_optim, fit_schedule
from tests.corpus import write_dataset

ROOT = Path(__file__).parents[2]


def test_precedence_default_base_file_command_line(tmp_path):
    text = "[training]\nsteps = 50\nseq_len = 64\nlocal_batch_size = 3\n"
    (tmp_path / "base.toml").write_text(text, encoding="utf-8-sig")  # with a byte order mark
    (tmp_path / "child.toml").write_text('base = "base.toml"\n[training]\nseq_len = 128\n[model]\nflavor = "8B"\n')
    words = ["--training.local_batch_size=5", "--training.local_batch_size=6", "--run.seed", "7"]
    config = load_config(["--compile.enable", str(tmp_path / "child.toml"), *words])  # a bare FILE.toml is the config
    assert config.compile.enable
    assert (config.training.steps, config.training.seq_len, config.training.local_batch_size) == (50, 128, 6)
    assert (config.model.flavor, config.run.seed, config.training.max_norm) == ("8B", 7, Training().max_norm)


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--data.weights=.7, 1."], "data.weights", (0.7, 1.0)),
        (['--data.datasets=["a", "b"]'], "data.datasets", ("a", "b")),
        (["--parallelism.dp_shard", "-1"], "parallelism.dp_shard", -1),
        (["--training.steps=100_000"], "training.steps", 100_000),
        (["--run.folder=123"], "run.folder", "123"),
        (["--training.global_batch_size", "8 @ 0, 16 @ 2B"], "training.global_batch_size", "8 @ 0, 16 @ 2B"),
    ],
)
def test_command_line_values(words, key, value):
    assert attrgetter(key)(load_config(words)) == value


MISTAKES = {  # words of a command line → parts of what is said: the option, its value, what is allowed or meant
    "--training.stpes=3": "training.stpes|did you mean --training.steps",
    "--learning-rate 1": "did you mean --optimizer.lr?",
    "training.steps=3": "training.steps=3|FILE.toml|--section.field=value",
    "--training.steps=ten": 'training.steps = "ten"|an integer >= 1',
    "--training.steps=0": "training.steps = 0|an integer >= 1",
    "--optimizer.lr=nan": "optimizer.lr|a number >= 0",
    "--training.global_batch_size='8 @ 1k'": "8 @ 1k|from 0 on",
    "--training.global_batch_size='8 @ 0, 16 @ 2k, 8 @ 2k'": "16 @ 2k, 8 @ 2k|must rise",
    "--data.weights=1,x": "data.weights|x|a number above 0",
    "--training.param_dtype=bf16": "param_dtype|bf16|did you mean bfloat16",
    "--training.epochs=1 --training.steps=3": "training.steps and training.epochs",
    "--optimizer.groups='[{weight_decay = -0.5}]'": "optimizer.groups[0].weight_decay",
    "--optimizer.groups='[{decay = 0.5}]'": "optimizer.groups|weight_decay",
    "--resume=x --run.folder=y": "--resume=x|leave those out",
    "--resume=train_config": "--resume=train_config|train_config/config.toml does not exist",
    "--checkpoint.branch_from=s3://b/x@5": "branch_from=s3://b/x@5|FILE.toml",
    "--help training.stpes": "--help training.stpes|did you mean --training.steps",
    "--config=debug.toml": "debug.toml|No such file|mean train_configs/debug.toml?",
    "--run.folder=s3://b/x": 'run.folder = "s3://b/x"|not a URL',
    "--checkpoint.folder=s3:/b/x": 'checkpoint.folder = "s3:/b/x"|s3://bucket/prefix',
    "--checkpoint.aws_secret_access_key=abc": "credentials are never part of a config",
    "--data.datasets=a,s3://key:secret@bucket/x": "data.datasets|s3://***@bucket/x|environment",
    "--checkpoint.folder=s3://key:secret@bucket/x": "checkpoint.folder|s3://***@bucket/x|environment",
    # Fields of the model.
    "--model.n_head=4": "model.n_head|did you mean --model.n_heads",
    "--model.rope_scaling='{kind = \"linaer\"}'": "model.rope_scaling.kind|linaer",
    "--model.windows=[-3]": "model.windows[0]|>= 0",
    "--model.tie_embeddings=2": "model.tie_embeddings = 2|true or false",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_named(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as error:
        load_config(shlex.split(words))
    for part in MISTAKES[words].split("|"):
        assert part in str(error.value)
    assert not re.search("secret@|abc", str(error.value))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[training]\nseqlen = 3\n", "did you mean training.seq_len?"),
        ("[traning]\nsteps = 3\n", "did you mean training?"),
        ("[training\n", "not valid TOML"),
        ("training = 3\n", "must be a section"),
        ('base = "y.toml"\n', "y.toml: cannot be read: No such file"),
        ('base = "../link/x.toml"\n', "is its own base"),
    ],
)
def test_a_mistake_in_a_file_is_named(text, said, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    (folder / "x.toml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config([f"--config={folder / 'x.toml'}"])
    assert said in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_what_comes_later_counts(tmp_path):
    """Also of fields of the model, and of steps and epochs, which both say how long a run is."""
    (tmp_path / "base.toml").write_text("[model]\ndim = 32\nn_heads = 2\n[training]\nepochs = 2.0\n")
    (tmp_path / "child.toml").write_text('base = "base.toml"\n[model]\ndim = 64\n[training]\nsteps = 7\n')
    child = str(tmp_path / "child.toml")
    config = load_config([child])
    assert (config.model.dim, config.model.n_heads) == (64, 2)
    assert (config.training.steps, config.training.epochs) == (7, 0)
    assert load_config([child, "--model.dim=128"]).model.dim == 128
    assert load_config([child, "--training.epochs=3"]).training.epochs == 3
    assert load_config([str(tmp_path / "base.toml"), "--training.steps=9"]).training.epochs == 0


def test_a_checkpoint_s_shape_is_taken_where_no_flavor_is_named():
    place = "--checkpoint.initial_load=x"
    assert load_config([place]).model.flavor == "checkpoint"
    assert load_config([place, "--model.flavor=8B"]).model.flavor == "8B"
    assert load_config([place, "train_configs/llama3_8b.toml"]).model.flavor == "checkpoint"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--optimizer.momentum=0.9", "optimizer.momentum = 0.9"),
        ("--lr_scheduler.schedule=cosine --lr_scheduler.decay=sqrt", 'lr_scheduler.decay = "sqrt"'),
        ("--lr_scheduler.schedule=constant --lr_scheduler.min_lr_factor=0.5", "lr_scheduler.min_lr_factor = 0.5"),
        ("--parallelism.outer_lr=1", "parallelism.outer_lr = 1.0"),
        ("--parallelism.cp_method=ring", 'parallelism.cp_method = "ring"'),
        ("--parallelism.pp=2 --parallelism.pp_stages_per_rank=3", "parallelism.pp_stages_per_rank = 3"),
        ("--activation_checkpoint.every_n_layers=2", "activation_checkpoint.every_n_layers = 2"),
        ("--activation_checkpoint.mode=full --activation_checkpoint.memory_budget=0.5", "memory_budget = 0.5"),
        ("--failures.bad_step_budget=3", "failures.bad_step_budget = 3"),
    ],
)
def test_settings_without_effect_are_refused(words, named):
    with pytest.raises(ConfigError, match=re.escape(named)):
        settings.check_effects(load_config(words.split()))


def test_a_section_that_is_off_may_keep_its_settings():
    words = ["--float8.enable=false", "--float8.recipe=rowwise", "--optimizer.groups=[{kind='muon'}]"]
    settings.check_effects(load_config([*words, "--optimizer.momentum=0.9"]))


def test_schedules_are_read_as_written():
    written = "1 @ 0, 2 @ 10, 3@1.5k,4 @ 2_000_000, 5 @ 500M , 6 @ 0.7B, 7 @ 12T"
    begins = [0, 10, 1500, 2 * 10**6, 5 * 10**8, 7 * 10**8, 12 * 10**12]
    assert load_config([f"--training.global_batch_size={written}"]).training.global_batch_size == written
    assert settings.parse_schedule(written) == [*zip(begins, range(1, 8), strict=True)]
    assert settings.parse_schedule(16) == [(0, 16)]


def test_resolved_config_reads_back_the_same(tmp_path):
    prompt = (
        "--validation.sample_prompt=tab\t, \x7f, \u2028, \\ and 🙂, s3://visit http://example.org @someone"  # no place
    )
    config = load_config(['--data.datasets=a b,c"d', "--optimizer.lr=3e-5", "--compile.enable", prompt])
    (tmp_path / "saved.toml").write_text(settings.to_toml(config), encoding="utf-8")
    assert load_config([f"--config={tmp_path / 'saved.toml'}"]) == config


def test_a_run_is_resumed_by_its_own_config(tmp_path, caplog):
    """Settings of another version, which this one does not know, are left out and named."""
    text = (
        settings.to_toml(Config(run=settings.Run(seed=5), training=Training(steps=70, seq_len=64)))
        + '[branch]\nidea = "s3://me:secret@x"\n'
    )
    text = text.replace("[optimizer]\n", "[optimizer]\nidea = 3\n")
    text = text.replace("[model]\n", "[model]\nidea = 1\n")
    (tmp_path / "config.toml").write_text(text)
    config = load_config(["--resume", str(tmp_path), "--training.steps=90"])
    assert config == Config(run=settings.Run(folder=str(tmp_path), seed=5), training=Training(steps=90, seq_len=64))
    assert settings.recorded_config(tmp_path).training.steps == 70
    assert caplog.messages[:1] == [
        f"{tmp_path / 'config.toml'}: settings that this version does not know, left out: "
        "model.idea = 1, optimizer.idea = 3, branch.idea = 's3://***@x'"
    ]
    (tmp_path / "config.toml").write_text("[run")
    with pytest.raises(ConfigError, match=r"config\.toml: .*not valid TOML"):
        load_config([f"--resume={tmp_path}"])


def test_a_resume_of_a_run_of_epochs_takes_the_steps_that_are_typed(tmp_path):
    """And keeps the run's own model beside a place to load from."""
    (tmp_path / "config.toml").write_text(to_toml(Config(training=Training(steps=14, epochs=1.0))))
    resume = ["--resume", str(tmp_path)]
    assert load_config(resume).training == Training(steps=14, epochs=1.0)
    assert load_config([str(tmp_path / "config.toml")]).training.epochs == 1
    assert load_config([*resume, "--training.steps=20"]).training == Training(steps=20)
    assert load_config([*resume, "--training.epochs=2"]).training.epochs == 2
    assert load_config([*resume, "--checkpoint.initial_load=x"]).model.flavor == Config().model.flavor
    with pytest.raises(ConfigError, match=re.escape(f"--resume={tmp_path}x: ") + f".*did you mean {tmp_path}"):
        load_config([f"--resume={tmp_path}x"])


def test_help_of_words_prints_the_settings_that_have_them_all(capsys, monkeypatch):
    def printed(*words):
        with pytest.raises(SystemExit) as ended:
            load_config(words)
        assert ended.value.code == 0
        return re.findall(r"^  --(\S+)=", capsys.readouterr().out, re.MULTILINE)

    assert printed("--help", "nesterov") == ["parallelism.outer_momentum"]  # in its text
    assert printed("-h", "Warmup_Steps") == ["lr_scheduler.warmup_steps"]  # in its name
    assert printed("--run.seed=1", "--help", "running", "squared", "--run.seed=1") == ["optimizer.beta2"]
    monkeypatch.setattr(settings, "field_docs", lambda section: {})  # a fork's, without a text
    assert printed("--help", "warmup_steps") == ["lr_scheduler.warmup_steps"]


def test_help_shows_what_would_run_and_every_flavor(capsys):
    with pytest.raises(SystemExit):
        load_config([str(ROOT / "train_configs/default.toml"), "--optimizer.beta2=0.9", "--help"])
    text = capsys.readouterr().out
    assert re.findall(r"^  --(\S+)=", text, re.MULTILINE) == list(settings.KINDS)
    printed = " ".join(text.split())
    assert "--optimizer.lr=... a number >= 0; here 0.004; default 0.0003 " in printed
    assert "--optimizer.beta2=... a number from 0 to 0.99999; here 0.9; default" in printed
    assert 'betas; here [{pattern = "[to]*.weight", lr = 5.0}]; default []' in printed
    assert f"Size within the family: {', '.join(FLAVORS)}. " in printed
    fields = {item.name for item in dataclasses.fields(LlamaConfig)}
    assert fields == {item.name for item in dataclasses.fields(settings.Model)} - {"name", "flavor"}


def test_a_branch_takes_the_config_of_its_trunk(tmp_path):
    trunk = Config(
        run=settings.Run(folder="outputs/trunk"),
        checkpoint=settings.Checkpoint(initial_load="x", keep=3),
        optimizer=settings.Optimizer(lr=0.5),
    )
    (tmp_path / "config.toml").write_text(to_toml(trunk))
    place = f"{tmp_path}@5"
    branch = load_config([f"--checkpoint.branch_from={place}", "--optimizer.beta1=0.5"])
    assert branch == Config(
        checkpoint=settings.Checkpoint(branch_from=place, keep=3), optimizer=settings.Optimizer(lr=0.5, beta1=0.5)
    )
    other = load_config(["train_configs/debug.toml", f"--checkpoint.branch_from={place}"])
    assert other.optimizer == load_config(["train_configs/debug.toml"]).optimizer


def test_every_field_is_documented_and_help_prints_it():
    text = settings.help_text(Config())
    assert {*settings.OTHER_NAMES} <= {*settings.KINDS, "resume"}
    for section, kind in settings.SECTIONS.items():
        assert f"[{section}]  {kind.__doc__}" in text
        docs = settings.field_docs(kind)
        for item in dataclasses.fields(kind):
            assert f"--{section}.{item.name}=" in text
            assert "\n      ".join(["", *docs[item.name].splitlines()]) in text
            assert docs[item.name].endswith(".")


@pytest.mark.parametrize("path", sorted((ROOT / "train_configs").glob("*.toml")), ids=lambda path: path.stem)
def test_every_config_loads_and_names_a_flavor(path):
    config = load_config([f"--config={path}"])
    find_model(config.model, data_vocab_size=1000)
    check_optim(config)
    assert fit_schedule(config.lr_scheduler, config.training.steps)[0] == config.lr_scheduler.warmup_steps


@pytest.mark.parametrize(
    ("module", "others"),
    [
        ("config", {"torch", "numpy"}),
        ("train", {"models.llama.hf", "models.trained", "models.generation", "data.chat", "validate", "transformers"}),
        ("train", {"storage.s3", "botocore"}),
    ],
)
def test_what_is_not_needed_is_not_loaded(module, others):
    code = f"import sys, {module}; assert not {others} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_errors_are_said_in_one_line():
    for program in ("config", "tools.processes"):
        command = [sys.executable, "-m", program, "--training.steps=x"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 2
        assert result.stderr.count("\n") == 1
        assert result.stderr.startswith("error: training.steps")


def commands_of_run_llama_train():
    """CONFIG_FILE, FILE.toml and options of every command with `run_llama_train.sh` in the pages and the script."""
    pages = (ROOT / "README.md", ROOT / "run_llama_train.sh", *(ROOT / "docs").glob("*.md"))
    text = "\n".join(page.read_text() for page in pages).replace("\\\n", " ")
    words = r"((?:[A-Z_]+=\S+ )*)\./run_llama_train\.sh((?: +train_configs/\S+)?(?: +--(?!help|resume|data )\S+)*)"
    return sorted({" ".join("".join(found).split()) for found in re.findall(words, text)})


@pytest.mark.parametrize("command", commands_of_run_llama_train())
def test_what_the_pages_tell_to_type_is_accepted(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [word.removeprefix("CONFIG_FILE=") for word in shlex.split(command)]
    words = [word for word in words if word.startswith(("--", "train_configs/"))]
    check_optim(load_config(["train_configs/debug.toml", *words]))


# ---------------------------------------------------------------- train.py's checks

PP, TP, CP, DP = ("--parallelism.pp=2", "--parallelism.tp=2", "--parallelism.cp=2", "--parallelism.dp_replicate=2")
RING = "--parallelism.cp_method=ring"
LONG = "--comm.store_retry_seconds=240"
GROUPS, IN_CHUNKS = "--parallelism.reshard_group_size=2", "--training.loss_chunks=4"
BUDGET, INDUCTOR = "--activation_checkpoint.mode=budget", 'needs compile.enable = true and compile.backend = "inductor"'
SMALL_STATE = "--optimizer.state_dtype=bfloat16"
REFUSED = [  # words, ranks, what is said: each would otherwise train wrongly, fail late or be ignored
    ([PP, "--model.flavor=1B"], 2, "one weight as embedding and output"),
    ([PP, IN_CHUNKS], 2, "needs parallelism.tp = 1 and pp = 1"),
    ([PP, "--training.z_loss=1e-4"], 2, "parallelism.pp = 2: the loss has z_loss, which needs pp = 1"),
    (
        ["--float8.enable", "--float8.skip=[]", IN_CHUNKS, "--training.seq_len=20"],
        1,
        "tokens must be a multiple of 64",
    ),
    ([PP, GROUPS], 8, "needs reshard_after_forward = true, pp = 1, tp = 1 and local_steps = 0"),
    ([BUDGET], 1, INDUCTOR),
    ([CP, RING, "--data.mask_documents"], 2, "cannot tell documents apart"),
    ([CP, RING, "--model.windows=8"], 2, 'cp_method = "ring": has no windows'),
    ([CP, "--training.seq_len=254"], 2, "must be a multiple of 4"),
    ([CP, "--training.seq_len=2 @ 0, 256 @ 1k"], 2, "seq_len = 2: must be a multiple of 4"),
    (["--training.seq_len=24 @ 0, 256 @ 1k"], 1, "seq_len = 24: must divide the longest, 256"),
    ([PP, "--training.seq_len=128 @ 0, 256 @ 1k"], 2, "must be one with parallelism.pp = 2"),
    (["--training.global_batch_size=16 @ 0, 24 @ 1k"], 2, "global_batch_size = 24: must be .*8 x 2"),
    (["--parallelism.tp=3"], 3, "n_heads"),
    ([TP, "--model.vocab_size=49159"], 2, "tp = 2: must divide vocab_size = 49159"),
    ([TP, "--model.qk_norm=width"], 2, "tp = 2: no rank has the whole width"),
    (["--parallelism.local_steps=10"], 2, "needs dp_replicate above 1"),
    (["--parallelism.local_steps=30", DP], 2, "checkpoint.interval = 200: must be a multiple of"),
    (['--optimizer.groups=[{pattern="norms", lr=0.1}]'], 1, "'norms' matches no weight"),
    (['--optimizer.groups=[{pattern="*"}, {pattern="*norm*"}]'], 1, r"'\*norm\*' matches no weight that an earlier"),
    (['--optimizer.groups=[{kind="muon"}]'], 1, "norm.weight is no matrix"),
    (["--optimizer.groups=[{betas=[0.9]}]"], 1, r"betas of '\*': \[0.9\], but adamw has 2"),
    (["--metrics.hook=nowhere:log"], 1, "metrics.hook = 'nowhere:log': must be of the form package.module:function"),
    (["--profiling.trace", "--training.steps=9"], 1, "profiling.trace_start = 10: exceeds training.steps = 9"),
    (["--profiling.memory_snapshot"], 1, "memory_snapshot = true: needs CUDA"),
    (["--optimizer.name=muon", "--parallelism.cpu_offload"], 1, "cpu_offload = true: Muon's matrices are not sent"),
    (["--failures.on_bad_step=rollback"], 1, "needs a torchrun that starts the run again"),
    (["--optimizer.beta2=0.99", SMALL_STATE], 1, "beta2 = 0.99: must be at most 0.98"),
    (["--optimizer.momentum=0.999", "--optimizer.name=muon", SMALL_STATE], 1, "momentum = 0.999: must be"),
    ([SMALL_STATE, "--optimizer.groups=[{betas=[0.9,0.99]}]"], 1, r"betas of '\*'\[1\] = 0.99: must be"),
    (["--data.datasets="], 1, "name at least one"),
    (["--training.global_batch_size=7"], 2, "training.global_batch_size = 7: must be .*8 x 2"),
    (["--model.vocab_size=64"], 1, "model.vocab_size = 64"),
    (["--training.seq_len=1000000"], 1, "training.seq_len = 1000000"),
    (["--data.weights=1,2"], 1, "an entry for each of data.datasets"),
    (["--checkpoint.folder=s3://b/x", LONG], 1, "comm.store_retry_seconds = 240: must be below 240 = 0.8 x"),
    (["--checkpoint.enable=false", "--checkpoint.branch_from=a"], 1, "branch_from is set and needs checkpoint.enable"),
    (["--validation.average=3"], 1, "validation.average = 3: needs .* checkpoint.keep = 3 or more, or 0"),
    (["--checkpoint.branch_from=a", "--checkpoint.initial_load=b"], 1, "two ways to begin"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    write_dataset(folder / "data", [[[*range(1, 99), 0]] * 9], [[1, 0]])
    (folder / "none.toml").touch()
    return folder


@pytest.mark.parametrize(("words", "world_size", "said"), REFUSED, ids=[" ".join(words) for words, *_ in REFUSED])
def test_what_cannot_train_is_refused_before_anything_starts(words, world_size, said, place, monkeypatch):
    """Before the process group starts, and before a byte is written."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setattr(train, "TrainingRun", mock.Mock(side_effect=AssertionError("not refused")))
    before = {*place.rglob("*")}
    with pytest.raises(TitaniteError, match=said):
        train.train(load_config(["none.toml", "--data.datasets=data", *words]))
    assert not dist.is_initialized()
    assert {*place.rglob("*")} == before

"""Config: precedence, types, and errors that name the key, the value, what is allowed and the nearest name."""

import contextlib
import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

import config as settings
from config import Config, ConfigError, Training, grad_accum_steps, load_config

ROOT = Path(__file__).parents[2]


def test_precedence_default_base_file_command_line(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("[training]\nsteps = 50\nseq_len = 64\nlocal_batch_size = 3\n")
    (tmp_path / "child.toml").write_text('base = "base.toml"\n[training]\nseq_len = 128\n[model]\nflavor = "8B"\n')
    config = load_config([f"--config={tmp_path / 'child.toml'}", "--training.local_batch_size=5", "--run.seed", "7"])
    assert (config.training.steps, config.training.seq_len, config.training.local_batch_size) == (50, 128, 5)
    assert (config.model.flavor, config.run.seed, config.training.gc_interval) == ("8B", 7, Training().gc_interval)


@pytest.mark.parametrize(
    ("words", "get", "value"),
    [
        (["--compile.enable"], lambda c: c.compile.enable, True),
        (["--compile.enable=false"], lambda c: c.compile.enable, False),
        (["--data.datasets=a,b", "--data.weights=1,2.5"], lambda c: c.data.datasets, ("a", "b")),
        (['--data.datasets=["a", "b"]'], lambda c: c.data.datasets, ("a", "b")),
        (["--optimizer.lr=1e-4"], lambda c: c.optimizer.lr, 1e-4),
        (["--optimizer.lr", "1"], lambda c: c.optimizer.lr, 1.0),
        (["--optimizer.lr=.5"], lambda c: c.optimizer.lr, 0.5),
        (["--optimizer.eps=1."], lambda c: c.optimizer.eps, 1.0),
        (["--parallelism.dp_shard", "-1"], lambda c: c.parallelism.dp_shard, -1),
        (["--data.datasets=data/🙂"], lambda c: c.data.datasets, ("data/🙂",)),
        (["--training.steps=100_000"], lambda c: c.training.steps, 100_000),
        (["--run.seed=9223372036854775807"], lambda c: c.run.seed, 2**63 - 1),
        (["--run.folder=123"], lambda c: c.run.folder, "123"),
        (["--run.folder", ""], lambda c: c.run.folder, ""),
        (["--metrics.log_ranks=0,1"], lambda c: c.metrics.log_ranks, (0, 1)),
        (["--data.datasets=a,b", "--data.weights=.7, 1."], lambda c: c.data.weights, (0.7, 1.0)),
    ],
)
def test_command_line_values(words, get, value) -> None:
    assert get(load_config(words)) == value


TWO_CONFIGS = (["--config=a.toml", "--config=b.toml"], ["a.toml", "--config=b.toml"], ["a.toml", "b.toml"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--training.stpes=3"], ["training.stpes", "did you mean training.steps"]),
        (["--trainin.steps=3"], ["trainin.steps", "did you mean --training.steps?"]),
        (["--steps=3"], ["steps: unknown key; did you mean --training.steps?"]),
        (["--lr=1e-3"], ["lr: unknown key; did you mean --optimizer.lr?"]),
        (["--model.lr=1e-3"], ["did you mean --optimizer.lr?"]),
        (["--learning_rate=1"], ["did you mean --optimizer.lr?"]),
        (["--learning-rate", "1"], ["did you mean --optimizer.lr?"]),
        (["--batch_size=4"], ["did you mean --training.local_batch_size?"]),
        (["--gbs=4"], ["did you mean --training.global_batch_size?"]),
        (["--iters=4"], ["did you mean --training.steps?"]),
        (["--context_length=4"], ["did you mean --training.seq_len?"]),
        (["--warmup=4"], ["did you mean --lr_scheduler.warmup_steps?"]),
        (["--grad_clip=1"], ["did you mean --training.max_norm?"]),
        (["--dataset=x"], ["did you mean --data.datasets?"]),
        (["--out_dir=x"], ["did you mean --run.folder?"]),
        (["--resume_from=x"], ["did you mean --resume?"]),
        (["--resum=x"], ["did you mean --resume?"]),
        (["--stpes=3"], ["did you mean --training.steps?"]),
        (["--datasets=x"], ["did you mean --data.datasets or --validation.datasets?"]),
        (["--xyzzy=3"], ["xyzzy: unknown key", "--help WORD"]),
        (["training.steps=3"], ["training.steps=3", "FILE.toml", "--section.field=value"]),
        (["--training.steps=ten"], ["training.steps", "ten", "an integer >= 1"]),
        (["--training.steps=5\nseed=3"], [r'training.steps = "5\nseed=3"', "an integer >= 1"]),
        (["--training.steps=0"], ["training.steps = 0", ">= 1"]),
        (["--training.steps=1.5"], ["training.steps = 1.5", "an integer"]),
        (["--training.steps=true"], ["training.steps = true", "an integer"]),
        (["--compile.enable=yes"], ["compile.enable", "yes", "true or false"]),
        (["--optimizer.lr=nan"], ["optimizer.lr", "a number"]),
        (["--optimizer.eps=0"], ["optimizer.eps = 0.0", "a number >= 1e-30"]),
        (["--optimizer.beta2=0.99", "--optimizer.state_dtype=bfloat16"], ["optimizer.beta2 = 0.99", "at most 0.98"]),
        (["--compile.backend=inducter"], ["compile.backend", "inducter", "inductor"]),
        (["--optimizer.beta1=1"], ["optimizer.beta1 = 1.0", "from 0 to below 1"]),
        (["--lr_scheduler.min_lr_factor=1.5"], ["min_lr_factor = 1.5", "from 0 to 1"]),
        (["--run.folder", "--training.steps=3"], ["--run.folder: needs a value"]),
        (["--config"], ["--config: needs a value"]),
        (["--config="], ["--config: needs a value"]),
        *((words, ["--config: given twice", "'a.toml' and 'b.toml'"]) for words in TWO_CONFIGS),
        (["--data.tokenizer", "a.toml"], ["--data.tokenizer: needs a value"]),
        (["--resume"], ["--resume: needs a value"]),
        (["--resume="], ["--resume: needs a value"]),
        (["--resume=x", "a.toml"], ["--resume=x", "leave --config=a.toml out"]),
        (["--resume=x", "--run.folder=y"], ["--resume=x", "leave --run.folder out"]),
        (["--resume", "s3://me:secret@x"], ["--resume=s3://***@x", "not the folder of a run"]),
        (["--help", "training.stpes"], ["--help training.stpes: no setting", "did you mean training.steps?"]),
        (["-h", "learning_rate"], ["--help learning_rate: no setting", "did you mean --optimizer.lr?"]),
        (["--failures.spike_factor=0.5"], ["failures.spike_factor = 0.5", "above 1"]),
        (["--data.datasets=s3://b/x", "--data.retry_seconds=240"], ["data.retry_seconds = 240", "below 240"]),
        (["--validation.datasets=s3://b/x", "--data.retry_seconds=240"], ["data.retry_seconds = 240", "below 240"]),
        (
            ["--data.datasets=s3://b/x", "--comm.init_timeout_seconds=200"],
            ["data.retry_seconds = 180", "below 160", "comm.init_timeout_seconds"],
        ),
        (["--checkpoint.timeout_seconds=190"], ["checkpoint.timeout_seconds = 190", "must exceed 190"]),
        (
            ["--checkpoint.upload=s3://b/x", "--comm.store_retry_seconds=240"],
            ["store_retry_seconds = 240", "below 240"],
        ),
        (["--run.folder=s3://b/x"], ['run.folder = "s3://b/x"', "must be a folder", "checkpoint.folder"]),
        (["--run.outputs=s3://b/x"], ['run.outputs = "s3://b/x"', "must be a folder", "checkpoint.upload"]),
        (["--checkpoint.folder=s3:/b/x"], ['checkpoint.folder = "s3:/b/x"', "s3://b/x"]),
        (["--data.datasets=a,s3:/b/x"], ['data.datasets = ["a", "s3:/b/x"]', "s3://b/x"]),
        (["--run.folder=~/x"], ['run.folder = "~/x"', "~ is not expanded"]),
        (["--checkpoint.initial_load=~me/x"], ['checkpoint.initial_load = "~me/x"', "~ is not expanded"]),
        (["--config=" + 300 * "a"], ["aaa: cannot be read: File name too long"]),
        (["--data.weights=1,x"], ["data.weights", '"x"', "a number"]),
        (2 * ["--data.datasets=s3://me:secret@x"], ["data.datasets: given twice", "s3://***@x"]),
        (
            ["--config=debug.toml"],
            ["debug.toml: cannot be read: No such file or directory", "did you mean train_configs/debug.toml?"],
        ),
        (["--data.cache_folder=s3://b/x"], ['data.cache_folder = "s3://b/x"', "must be a folder"]),
        (["--checkpoint.folder=gs://b/x"], ['checkpoint.folder = "gs://b/x"', "s3://bucket/prefix"]),
        (["--checkpoint.upload=s3:///x"], ['checkpoint.upload = "s3:///x"', "s3://bucket/prefix"]),
        (["--checkpoint.initial_load=hf://x/y"], ['checkpoint.initial_load = "hf://x/y"', "a folder"]),
        (["--profiling.trace", "--profiling.trace_start=401"], ["trace_start = 401", "training.steps = 400"]),
        (
            ["--profiling.trace", "--profiling.trace_start=1", "--training.steps=1", "--lr_scheduler.warmup_steps=0"],
            ["the first step traced, 2", "training.steps = 1"],
        ),
        (["--checkpoint.folder=x", "--checkpoint.upload=x/"], ["checkpoint.upload", "checkpoint.folder itself"]),
        (["--checkpoint.folder=s3://x/y", "--checkpoint.upload=s3://x/y/"], ["checkpoint.upload", "folder itself"]),
        (["--checkpoint.folder=./x", "--checkpoint.upload=y/../x"], ["checkpoint.upload", "folder itself"]),
        (["--run.folder=x", "--checkpoint.upload=x/checkpoints"], ["checkpoint.upload", "folder itself"]),
        (["--checkpoint.enable=false", "--checkpoint.save_model"], ["checkpoint.save_model = true", "enable = true"]),
        (
            ["--training.param_dtype=bf16"],
            ["training.param_dtype", "bf16", "bfloat16, float32", "did you mean bfloat16"],
        ),
        (["--training.steps=3", "--training.steps=4"], ["training.steps", "given twice"]),
        (["--config=train_configs/debgu.toml"], ["debgu.toml", "did you mean train_configs/debug.toml?"]),
        (["--data.datasets="], ["data.datasets", "at least one"]),
        (["--data.datasets=a,a"], ["data.datasets", "twice"]),
        (["--data.datasets=a/b,a/./b/"], ["data.datasets", "twice"]),
        (["--data.weights=1,2"], ["data.weights", "an entry for each of data.datasets"]),
        (["--data.weights=-1"], ["data.weights", "above 0"]),
        (["--lr_scheduler.warmup_steps=500"], ["lr_scheduler.warmup_steps = 500", "training.steps = 400"]),
        (
            ["--lr_scheduler.decay_fraction=0.99"],
            ["warmup_steps = 20: does not fit in training.steps = 400", "decay_fraction = 0.99 takes 396"],
        ),
        (["--validation.sample_tokens=5"], ["validation.sample_tokens = 5", "needs validation.sample_prompt"]),
        (["--checkpoint.aws_secret_access_key=abc"], ["credentials are never part of a config"]),
        (["--checkpoint.folder=s3://key:secret@bucket/x"], ["checkpoint.folder", "s3://***@bucket/x", "environment"]),
    ],
)
def test_bad_input_is_named(words, said) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(words)
    for part in said:
        assert part in str(error.value)
    assert "secret@" not in str(error.value)
    assert "abc" not in str(error.value)


def test_what_shapes_a_feature_may_stay_where_one_flag_switches_it_off() -> None:
    shapes = ["--parallelism.cp_method=ring", "--parallelism.pp_schedule=Interleaved1F1B", "--parallelism.outer_lr=1"]
    shapes += ["--parallelism.pp_microbatch_size=2", "--profiling.trace_start=999"]
    load_config([*shapes, "--float8.recipe=rowwise", "--float8.skip=[]", "--training.loss_chunks=4"])


def test_limits_may_be_reached() -> None:
    load_config(["--lr_scheduler.warmup_steps=20", "--lr_scheduler.decay_fraction=0.95", "--training.steps=400"])
    load_config(["--lr_scheduler.warmup_steps=400", "--lr_scheduler.decay_fraction=0", "--training.steps=400"])
    load_config(["--profiling.trace", "--profiling.trace_start=400", "--training.steps=400"])


def test_bad_files_are_named(tmp_path: Path) -> None:
    def error_of(text: str) -> str:
        (tmp_path / "x.toml").write_text(text)
        with pytest.raises(ConfigError) as error:
            load_config([f"--config={tmp_path / 'x.toml'}"])
        assert "x.toml" in str(error.value)
        return str(error.value)

    assert "did you mean training.seq_len" in error_of("[training]\nseqlen = 3\n")
    assert "did you mean training" in error_of("[traning]\nsteps = 3\n")
    assert "not valid TOML" in error_of("[training\n")
    assert "must be a section" in error_of("training = 3\n")
    assert "data = 's3://***@x': must be a section" in error_of("data = 's3://me:secret@x'\n")
    assert "leads back to itself" in error_of('base = "x.toml"\n')


def test_a_missing_config_file_has_no_list_of_others_where_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^x\.toml: cannot be read: No such file or directory$"):
        load_config(["--config=x.toml"])


def test_missing_base_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('base = "y.toml"\n')
    with pytest.raises(ConfigError, match=r"y\.toml: cannot be read: No such file"):
        load_config([f"--config={tmp_path / 'x.toml'}"])


def test_resolved_config_reads_back_the_same(tmp_path: Path) -> None:
    prompt = "--validation.sample_prompt=tab\t, \u2028, \\ and 🙂"
    config = load_config(['--data.datasets=a b,c"d', "--optimizer.lr=3e-5", "--compile.enable", prompt])
    (tmp_path / "saved.toml").write_text(settings.to_toml(config), encoding="utf-8")
    assert load_config([f"--config={tmp_path / 'saved.toml'}"]) == config


def test_what_another_version_recorded_is_named_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    text = settings.to_toml(Config(training=Training(steps=7))) + '[branch]\nidea = "s3://me:secret@x"\n'
    text = text.replace("[optimizer]\n", "[optimizer]\nidea = 3\n").replace('name = "adamw"', 'name = "lion"')
    values = settings.read_recorded(text.encode(), "outputs/a")
    assert settings.from_dict(values) == Config(training=Training(steps=7))
    assert caplog.messages == [
        "outputs/a: settings that this version does not know, left out: "
        "optimizer.idea = 3, optimizer.name = 'lion', branch.idea = 's3://***@x'"
    ]
    for damaged in (b"[", "[run]\nfolder = 'é'".encode("latin-1")):
        with pytest.raises(ConfigError, match="outputs/a: its config is not valid TOML"):
            settings.read_recorded(damaged, "outputs/a")
    with pytest.raises(ConfigError, match=r"outputs/a: base = 'x\.toml': must be in a section"):
        settings.read_recorded(b'base = "x.toml"', "outputs/a")


def test_a_run_is_resumed_by_its_own_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    text = settings.to_toml(Config(training=Training(steps=70, seq_len=64)))
    (folder / "config.toml").write_text(text.replace("[optimizer]\n", "[optimizer]\nidea = 3\n"))
    for words in (["--resume", str(folder)], [f"--resume={folder}"]):
        config = load_config([*words, "--training.steps=90"])
        assert config == Config(run=settings.Run(folder=str(folder)), training=Training(steps=90, seq_len=64))
        assert "optimizer.idea = 3" in caplog.text, "what this version does not know is named and left out"
        caplog.clear()
    other = tmp_path / "rum"
    with pytest.raises(ConfigError) as error:
        load_config([f"--resume={other}"])
    assert f"--resume={other}: not the folder of a run" in str(error.value)
    assert f"did you mean {folder}?" in str(error.value)
    (folder / "config.toml").write_text("[run")
    with pytest.raises(ConfigError, match=r"config\.toml: its config is not valid TOML"):
        load_config([f"--resume={folder}"])


@pytest.mark.parametrize("words", [["--compile.enable", "FILE"], ["FILE", "--compile.enable"], ["--config", "FILE"]])
def test_a_word_that_ends_in_toml_is_the_config(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("[training]\nsteps = 50\n")
    config = load_config([str(tmp_path / "x.toml") if word == "FILE" else word for word in words])
    assert (config.training.steps, config.compile.enable) == (50, "--compile.enable" in words)


def test_other_names_are_names_of_settings() -> None:
    assert {*settings.OTHER_NAMES} <= {*settings.KINDS, "--resume"}


def test_help_of_words_prints_the_settings_that_have_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*words: str) -> list[str]:
        with pytest.raises(SystemExit) as ended:
            load_config(words)
        assert ended.value.code == 0
        return re.findall(r"^  --(\S+)=", capsys.readouterr().out, re.MULTILINE)

    assert printed("--help", "nesterov") == ["parallelism.outer_momentum"]  # in its text
    assert printed("-h", "Warmup_Steps") == ["lr_scheduler.warmup_steps"]  # in its name
    assert printed("--config=x", "--help", "running", "squared", "--run.seed=1") == ["optimizer.beta2"]
    assert printed("--help") == list(settings.KINDS)


def test_differences_name_the_dotted_keys() -> None:
    new = dataclasses.replace(Config(), training=Training(steps=7))
    assert settings.differences(Config(), new) == {"training.steps": (Training().steps, 7)}


@pytest.mark.parametrize("path", sorted((ROOT / "train_configs").glob("*.toml")), ids=lambda path: path.stem)
def test_every_config_loads_and_names_a_flavor(path: Path) -> None:
    from models import find_model

    find_model(load_config([f"--config={path}"]).model, data_vocab_size=1000)


def test_every_field_is_documented_and_help_prints_it() -> None:
    text = settings.help_text()
    for section, kind in settings.SECTIONS.items():
        assert kind.__doc__
        assert kind.__doc__ in text
        docs = settings.field_docs(kind)
        for item in dataclasses.fields(kind):
            assert f"--{section}.{item.name}=" in text
            assert "\n      ".join(["", *docs[item.name].splitlines()]) in text
            assert docs[item.name].endswith(".")


def test_accumulation_must_divide() -> None:
    assert grad_accum_steps(Training(local_batch_size=4), dp=3) == 1
    assert grad_accum_steps(Training(local_batch_size=4, global_batch_size=24), dp=3) == 2
    for size in (4, 13, 20):
        with pytest.raises(ConfigError, match=rf"global_batch_size = {size}.*4 x 3 = 12"):
            grad_accum_steps(Training(local_batch_size=4, global_batch_size=size), dp=3)


def test_config_needs_no_torch_and_says_errors_in_one_line() -> None:
    code = "import sys, config; assert not {'torch', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    for program, exit_code in (("config", 2), ("launch.processes", 1)):
        command = [sys.executable, "-m", program, "--training.steps=x"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == exit_code
        assert result.stderr.count("\n") == 1
        assert result.stderr.startswith("error: training.steps")


def commands_of_run_llama_train() -> list[str]:
    """Every whole command line with `run_llama_train.sh` in the pages and in the script's own header."""
    found = []
    for page in (ROOT / "README.md", ROOT / "run_llama_train.sh", *sorted((ROOT / "docs").glob("*.md"))):
        for line in page.read_text().replace("\\\n", " ").splitlines():
            command = re.match(
                r"(?:[#$] +)?((?:[A-Z_]+=\S+ )*\./run_llama_train\.sh(?: +(?:--|train_configs/|outputs/)\S+)*)", line
            )
            if command and "--help" not in command[1]:
                found.append(command[1])
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("command", commands_of_run_llama_train())
def test_what_the_pages_tell_to_type_is_accepted(command: str) -> None:
    words = shlex.split(command)
    script = words.index("./run_llama_train.sh")
    environment, words = dict(word.split("=", 1) for word in words[:script]), words[script + 1 :]
    if "--resume" in words:  # a run of the reader's
        words.remove("--resume")
        words.remove(next(word for word in words if word.startswith("outputs/")))
    if not any(word.endswith(".toml") for word in words):
        words.insert(0, environment.get("CONFIG_FILE", "train_configs/debug.toml"))
    assert words[0].startswith("train_configs/")
    load_config([f"{ROOT / words[0]}", *words[1:]])


ASYNC, ZERO_BUBBLE = "--parallelism.async_tp", "--parallelism.pp_schedule=InterleavedZeroBubble"
TWO_STAGES, INDUCTOR = "--parallelism.pp=2", 'needs compile.enable = true and compile.backend = "inductor"'
REFUSED = [  # words, ranks, what is said: each would otherwise train wrongly, fail late or be ignored
    ([TWO_STAGES, ZERO_BUBBLE, "--compile.enable"], 2, "gives wrong gradients"),
    ([TWO_STAGES, "--model.flavor=1B"], 2, "one weight as embedding and output"),
    ([TWO_STAGES, "--training.local_batch_size=3", "--parallelism.pp_microbatch_size=2"], 2, "must divide"),
    ([TWO_STAGES, "--training.local_batch_size=1"], 2, "needs at least parallelism.pp = 2"),
    (
        [TWO_STAGES, "--parallelism.pp_schedule=Interleaved1F1B", "--training.local_batch_size=3"],
        2,
        "needs a multiple of parallelism.pp = 2",
    ),
    (["--parallelism.pp=8", "--training.local_batch_size=8"], 8, "8 stages .* for n_layers = 6"),
    ([TWO_STAGES, "--parallelism.sync_every_microbatch=false"], 2, "no effect with parallelism.pp = 2"),
    ([TWO_STAGES, "--parallelism.reshard_group_size=2"], 2, "needs parallelism.pp = 1, tp = 1"),
    (["--parallelism.tp=2", "--parallelism.reshard_group_size=2"], 8, "needs parallelism.pp = 1, tp = 1"),
    (
        ["--parallelism.local_steps=50", "--parallelism.dp_replicate=2", "--parallelism.reshard_group_size=2"],
        8,
        "needs .* local_steps = 0",
    ),
    (["--float8.enable", "--parallelism.reshard_group_size=2"], 4, "gathers no float8 weights"),
    ([TWO_STAGES, ZERO_BUBBLE, "--activation_checkpoint.mode=selective"], 2, "recomputes twice"),
    (["--activation_checkpoint.mode=budget", "--compile.enable", "--compile.backend=aot_eager"], 1, INDUCTOR),
    ([TWO_STAGES, "--training.loss_chunks=4"], 2, "needs parallelism.tp = 1 and pp = 1"),
    (["--parallelism.tp=2", "--training.loss_chunks=4"], 2, "needs parallelism.tp = 1 and pp = 1"),
    (["--float8.enable", "--float8.skip=[]", "--training.loss_chunks=4"], 1, 'unless float8.skip names "output"'),
    (["--parallelism.cp=2", "--parallelism.cp_method=ring", "--data.mask_documents"], 2, "cannot tell documents apart"),
    (["--parallelism.cp=2", "--training.seq_len=254"], 2, "must be a multiple of 4"),
    (["--parallelism.tp=3"], 3, "n_heads"),
    (["--parallelism.tp=8"], 8, "must divide n_kv_heads = 4"),
    (["--parallelism.tp=5", "--model.flavor=llama2_13B"], 5, "must divide hidden_dim = 13824"),
    (["--parallelism.tp=2", "--training.seq_len=255"], 2, "must be a multiple of 2"),
    (["--activation_checkpoint.mode=budget"], 1, INDUCTOR),
    (["--activation_checkpoint.every_n_layers=2"], 1, "needs mode full or selective"),
    (["--parallelism.reshard_group_size=3"], 8, "the 8 ranks that share the weights into groups: 2, 4, or 0"),
    (["--parallelism.reshard_group_size=2"], 3, "the 3 ranks that share the weights into groups: none can"),
    (["--parallelism.reshard_group_size=2", "--parallelism.reshard_after_forward=false"], 8, "needs reshard_after"),
    ([ASYNC, "--parallelism.tp=2"], 2, INDUCTOR),
    ([ASYNC, "--parallelism.tp=2", "--compile.enable", "--compile.backend=eager"], 2, INDUCTOR),
    ([ASYNC, "--compile.enable"], 1, "needs parallelism.tp above 1"),
    (["--failures.replay_interval=5"], 1, "needs run.deterministic"),
    (["--failures.on_bad_step=rollback", "--checkpoint.enable=false"], 1, "needs checkpoint.enable"),
    (["--parallelism.local_steps=10"], 2, "needs parallelism.dp_replicate above 1"),
    (["--parallelism.local_steps=30", "--parallelism.dp_replicate=2"], 2, "must be a multiple of"),
]


@pytest.mark.parametrize(("words", "world_size", "said"), REFUSED, ids=[" ".join(words) for words, *_ in REFUSED])
def test_combinations_that_cannot_train_are_refused_before_anything_starts(
    words: list[str], world_size: int, said: str
) -> None:
    from float8.convert import check_float8
    from models import find_model
    from parallel.mesh import ParallelDims

    def check() -> None:
        config = load_config(words)
        ParallelDims.from_config(config.parallelism, world_size)
        check_float8(config)
        spec, flavor = find_model(config.model, data_vocab_size=1024)
        spec.check_parallelism(flavor, config)

    with pytest.raises(ConfigError, match=said):
        check()


@pytest.mark.parametrize(
    ("device", "words", "said"),
    [
        ("cpu", [ASYNC, "--parallelism.tp=2", "--compile.enable"], "needs CUDA"),
        (
            "cuda",
            ["--parallelism.cp=2", "--parallelism.cp_method=ring", "--training.param_dtype=float32"],
            "on CUDA the ring needs bfloat16",
        ),
    ],
)
def test_what_a_device_cannot_compute_is_refused(
    device: str, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from models import find_model

    monkeypatch.setattr("models.llama.parallelize.device_type", lambda: device)
    config = load_config(words)
    spec, flavor = find_model(config.model, data_vocab_size=1024)
    with pytest.raises(ConfigError, match=said):
        spec.check_parallelism(flavor, config)


def test_zero_bubble_with_float8_is_refused_where_autograd_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    from models import find_model

    config = load_config([TWO_STAGES, ZERO_BUBBLE, "--training.local_batch_size=2", "--float8.enable"])
    spec, flavor = find_model(config.model, data_vocab_size=1024)
    for keeps in (True, False):
        monkeypatch.setattr("parallel.pipeline.keeps_functions", lambda keeps=keeps: keeps)
        with contextlib.nullcontext() if keeps else pytest.raises(ConfigError, match="cannot split the backward"):
            spec.check_parallelism(flavor, config)


COMMAND = """
import sys
from config import ConfigError, command_line
with command_line({}):
    {}
"""


@pytest.mark.parametrize(
    ("mistake", "work", "code", "said"),
    [
        ("", "raise PermissionError(13, 'is closed', 'a/b')", 1, "error: a/b: is closed\n"),
        ("2", "raise ConfigError('a mistake')", 2, "error: a mistake\n"),
        ("2", "raise KeyboardInterrupt", 130, ""),
        ("2", "sys.exit('said otherwise')", 1, "said otherwise\n"),
        ("2", "print('more'); raise BrokenPipeError('Broken pipe')", 1, "error: Broken pipe\n"),  # as of a worker
    ],
)
def test_how_commands_end(mistake: str, work: str, code: int, said: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND.format(mistake, work)], cwd=ROOT, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (code, said)


def test_help_may_be_read_in_part() -> None:
    """By a program that does nothing of itself about a reader who has enough, as train.py."""
    code = "import sys; from config import load_config; sys.stdin.read(); load_config(['--help'])"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=PIPE, stdout=PIPE, stderr=PIPE) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b"error: [Errno 32] Broken pipe\n"
    assert process.returncode == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_a_locale_cannot_write_ends_no_command(encoding: str) -> None:
    environment = {**os.environ, "PYTHONUTF8": "0", "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-c", COMMAND.format("", r"print('\u0142 \U0001f600')")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, env=environment)
    assert (ended.returncode, ended.stdout) == (0, b"\\u0142 \\U0001f600\n")
    command = [sys.executable, "-m", "config", "--run.folder=\xe9 \u0142"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, env=environment)
    assert settings.tomllib.loads(ended.stdout.decode())["run"]["folder"] == "\xe9 \u0142", "TOML is UTF-8"

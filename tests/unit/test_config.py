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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--training.stpes=3"], ["training.stpes", "did you mean training.steps"]),
        (["--trainin.steps=3"], ["trainin.steps", "did you mean training.steps"]),
        (["--steps=3"], ["steps", "did you mean"]),
        (["training.steps=3"], ["training.steps=3", "--section.field=value"]),
        (["--run.folder=s3://me:secret@a\udcff"], ["--run.folder=s3://***@a\\udcff", "UTF-8"]),
        (["--training.steps=ten"], ["training.steps", "ten", "an integer >= 1"]),
        (["--training.steps=5\nseed=3"], [r'training.steps = "5\nseed=3"', "an integer >= 1"]),
        (["--training.steps=9223372036854775807"], ["training.steps = 9223372036854775807", "at most 2**53"]),
        (["--training.steps=1" + 400 * "0"], ["training.steps = 1000", "at most 2**53"]),
        (["--training.steps=1" + 5000 * "0"], ['training.steps = "1000', "an integer >= 1"]),
        (["--metrics.log_ranks=0,9007199254740993"], ["metrics.log_ranks = 9007199254740993", "at most 2**53"]),
        (["--training.steps=0"], ["training.steps = 0", ">= 1"]),
        (["--training.steps=1.5"], ["training.steps = 1.5", "an integer"]),
        (["--training.steps=true"], ["training.steps = true", "an integer"]),
        (["--compile.enable=yes"], ["compile.enable", "yes", "true or false"]),
        (["--optimizer.lr=nan"], ["optimizer.lr", "a number"]),
        (["--optimizer.lr=1" + 400 * "0"], ["optimizer.lr", "a number"]),
        (["--optimizer.eps=0"], ["optimizer.eps = 0.0", "a number above 0"]),
        (["--optimizer.beta2=0.99", "--optimizer.state_dtype=bfloat16"], ["optimizer.beta2 = 0.99", "at most 0.98"]),
        (["--compile.backend=inducter"], ["compile.backend", "inducter", "inductor"]),
        (["--optimizer.beta1=1"], ["optimizer.beta1 = 1.0", "from 0 to below 1"]),
        (["--lr_scheduler.min_lr_factor=1.5"], ["min_lr_factor = 1.5", "from 0 to 1"]),
        (["--run.folder", "--training.steps=3"], ["--run.folder: needs a value"]),
        (["--config"], ["--config: needs a value"]),
        (["--config="], ["--config: needs a value"]),
        (["--config=a.toml", "--config=b.toml"], ["--config: given twice", "a.toml", "b.toml"]),
        (["--run.folder=\udc80"], ["run.folder", "UTF-8"]),
        (["--failures.spike_factor=0.5"], ["failures.spike_factor = 0.5", "above 1"]),
        (["--data.datasets=s3://b/x", "--data.retry_seconds=240"], ["data.retry_seconds = 240", "below 240"]),
        (["--validation.datasets=s3://b/x", "--data.retry_seconds=240"], ["data.retry_seconds = 240", "below 240"]),
        (
            ["--data.datasets=s3://b/x", "--comm.init_timeout_seconds=200"],
            ["data.retry_seconds = 180", "below 160", "comm.init_timeout_seconds"],
        ),
        (["--checkpoint.timeout_seconds=325"], ["checkpoint.timeout_seconds = 325", "must exceed 325"]),
        (["--checkpoint.visibility_seconds=1485"], ["checkpoint.timeout_seconds = 1800", "must exceed 1800"]),
        (["--run.folder=s3://b/x"], ["run.folder = 's3://b/x'", "must be a folder", "checkpoint.folder"]),
        (["--run.outputs=s3://b/x"], ["run.outputs = 's3://b/x'", "must be a folder", "checkpoint.upload"]),
        (["--checkpoint.folder=s3:/b/x"], ["checkpoint.folder = 's3:/b/x'", "s3://b/x"]),
        (["--data.datasets=a,s3:/b/x"], ["data.datasets = 's3:/b/x'", "s3://b/x"]),
        (["--run.folder=~/x"], ["run.folder = '~/x'", "~ is not expanded"]),
        (["--checkpoint.initial_load=~me/x"], ["checkpoint.initial_load = '~me/x'", "~ is not expanded"]),
        (["--run.folder=a\0b"], [r'run.folder = "a\u0000b"', "without a null character"]),
        (["--config=" + 300 * "a"], ["aaa: cannot be read: File name too long"]),
        (["--data.weights=1,x"], ["data.weights", '"x"', "a number"]),
        (2 * ["--data.datasets=s3://me:secret@x"], ["data.datasets: given twice", "s3://***@x"]),
        (["--config=debug.toml"], ["debug.toml: no such config file", "did you mean train_configs/debug.toml?"]),
        (["--data.cache_folder=s3://b/x"], ["data.cache_folder = 's3://b/x'", "must be a folder"]),
        (["--checkpoint.folder=gs://b/x"], ["checkpoint.folder = 'gs://b/x'", "s3://bucket/prefix"]),
        (["--checkpoint.upload=s3:///x"], ["checkpoint.upload = 's3:///x'", "s3://bucket/prefix"]),
        (["--checkpoint.initial_load=hf://x/y"], ["checkpoint.initial_load = 'hf://x/y'", "a folder"]),
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
        (["--config=train_configs/debgu.toml"], ["debgu.toml", "no such config", "debug.toml"]),
        (["--data.datasets="], ["data.datasets", "at least one"]),
        (["--data.datasets=a,a"], ["data.datasets", "twice"]),
        (["--data.datasets=a/b,a/./b/"], ["data.datasets", "twice"]),
        (["--data.weights=1,2"], ["data.weights", "an entry for each of data.datasets"]),
        (["--data.weights=-1"], ["data.weights", "above 0"]),
        (["--data.datasets=a,b", "--data.weights=1e308,1e308"], ["data.weights", "at least 1e-09 of their sum"]),
        (["--data.datasets=a,b", "--data.weights=1,1e-300"], ["data.weights", "at least 1e-09 of their sum"]),
        (["--lr_scheduler.warmup_steps=500"], ["lr_scheduler.warmup_steps = 500", "training.steps = 400"]),
        (["--lr_scheduler.decay_fraction=0.99"], ["decay_fraction = 0.99", "do not fit"]),
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
    assert "base = 'a\\x00b': must be the path" in error_of('base = "a\\u0000b"\n')


def test_a_missing_config_file_has_no_list_of_others_where_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^x\.toml: no such config file$"):
        load_config(["--config=x.toml"])


def test_missing_base_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('base = "y.toml"\n')
    with pytest.raises(ConfigError, match=r"y\.toml: no such config file"):
        load_config([f"--config={tmp_path / 'x.toml'}"])


def test_resolved_config_reads_back_the_same(tmp_path: Path) -> None:
    prompt = "--validation.sample_prompt=tab\t, DEL \x7f, \u2028, \\ and 🙂"
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
            command = re.match(r"(?:[#$] +)?((?:[A-Z_]+=\S+ )*\./run_llama_train\.sh(?: +--\S+)*)", line)
            if command and "--help" not in command[1]:
                found.append(command[1])
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("command", commands_of_run_llama_train())
def test_what_the_pages_tell_to_type_is_accepted(command: str) -> None:
    words = shlex.split(command)
    script = words.index("./run_llama_train.sh")
    file = dict(word.split("=", 1) for word in words[:script]).get("CONFIG_FILE", "train_configs/debug.toml")
    if not file.startswith("outputs/"):  # a run of the reader's
        load_config([f"--config={ROOT / file}", *words[script + 1 :]])


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
    ([TWO_STAGES, "--parallelism.reshard_group_size=2"], 2, "parallelism.pp = 2; set reshard_group_size = 0"),
    (
        ["--parallelism.tp=2", "--parallelism.reshard_group_size=2"],
        8,
        "cannot be used with parallelism.tp = 2; set reshard",
    ),
    (
        ["--parallelism.local_steps=50", "--parallelism.dp_replicate=2", "--parallelism.reshard_group_size=2"],
        8,
        "cannot be used with parallelism.local_steps = 50",
    ),
    (["--float8.enable", "--parallelism.reshard_group_size=2"], 4, "gathers no float8 weights"),
    ([TWO_STAGES, ZERO_BUBBLE, "--activation_checkpoint.mode=selective"], 2, "recomputes twice"),
    (["--activation_checkpoint.mode=budget", "--compile.enable", "--compile.backend=aot_eager"], 1, INDUCTOR),
    ([TWO_STAGES, "--training.loss_chunks=4"], 2, "must be 0 or 1"),
    (["--parallelism.tp=2", "--training.loss_chunks=4"], 2, "must be 0 or 1"),
    (["--float8.enable", "--float8.skip=[]", "--training.loss_chunks=4"], 1, 'unless float8.skip names "output"'),
    (["--parallelism.cp=2", "--parallelism.cp_method=ring", "--data.mask_documents"], 2, "cannot tell documents apart"),
    (["--parallelism.cp=2", "--training.seq_len=254"], 2, "must be a multiple of 4"),
    (["--parallelism.tp=3"], 3, "n_heads"),
    (["--parallelism.tp=8"], 8, "must divide n_kv_heads = 4"),
    (["--parallelism.tp=5", "--model.flavor=llama2_13B"], 5, "must divide hidden_dim = 13824"),
    (["--parallelism.tp=2", "--training.seq_len=255"], 2, "must be a multiple of 2"),
    (["--activation_checkpoint.mode=budget"], 1, INDUCTOR),
    (["--activation_checkpoint.every_n_layers=2"], 1, "needs mode full or selective, not none"),
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
with command_line():
    {}
"""


@pytest.mark.parametrize(
    ("work", "code", "said"),
    [
        ("[print('a line') for _ in range(100_000)]", 1, ""),
        ("print('a line', flush=True); sys.stdin.read(); print('one more')", 1, ""),  # only a flush at the end finds it
        ("print('a line', flush=True); sys.stdin.read(); print('more'); raise KeyboardInterrupt", 130, ""),
        ("print('a line', flush=True); sys.stdin.read(); print('more'); sys.exit(0)", 1, ""),  # as after --help
        ("print('a line', flush=True); sys.exit('a mistake')", 1, "a mistake\n"),
        ("print('a line', flush=True); raise PermissionError(13, 'is closed', 'a/b')", 1, "error: a/b: is closed\n"),
        (
            "print('a line', flush=True); sys.stdin.read(); print('more'); raise ConfigError('a mistake')",
            1,
            "error: a mistake\n",
        ),
    ],
)
def test_how_commands_end(work, code, said) -> None:
    """Without a traceback; also where nobody reads on, as after `| head -1`."""
    command = [sys.executable, "-c", COMMAND.format(work)]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, cwd=ROOT, env=buffered, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == "a line\n"
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == said
    assert process.returncode == code


def test_help_may_be_read_in_part() -> None:
    """By a program that does nothing of itself about a reader who has enough, as train.py."""
    code = "import sys; from config import load_config; sys.stdin.read(); load_config(['--help'])"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=PIPE, stdout=PIPE, stderr=PIPE) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_words_that_are_no_text_end_a_command() -> None:
    command = [os.fsencode(sys.executable), b"-c", COMMAND.format("print('ran')").encode(), b"--prompt=\xff"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONUTF8": "1"})
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("error: '--prompt=\\udcff': is not valid text in this locale, utf-8")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_a_locale_cannot_write_ends_no_command(encoding: str) -> None:
    environment = {**os.environ, "PYTHONUTF8": "0", "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-c", COMMAND.format(r"print('\u0142 \U0001f600')")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, env=environment)
    assert (ended.returncode, ended.stdout) == (0, b"\\u0142 \\U0001f600\n")
    command = [sys.executable, "-m", "config", "--run.folder=\xe9 \u0142"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, env=environment)
    assert settings.tomllib.loads(ended.stdout.decode())["run"]["folder"] == "\xe9 \u0142", "TOML is UTF-8"


def test_a_broken_pipe_that_is_not_the_output_is_no_quiet_end() -> None:
    command = [sys.executable, "-c", COMMAND.format("raise BrokenPipeError('of a worker')")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "BrokenPipeError: of a worker" in ended.stderr
    assert ended.returncode == 1

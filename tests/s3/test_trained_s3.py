"""Text and scores from a checkpoint on a real S3 server."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from config import TitaniteError
from data.tokenizer import train_tokenizer
from generate import main as generate
from tests.corpus import write_dataset
from tests.runs import launch
from tests.unit.test_families import FAMILIES, SHAPE
from tests.unit.test_follow import followed, harness, score_of, settings  # noqa: F401
from tools.average import main as average
from tools.hf import export_model
from tools.hf import main as checkpoint_hf
from validate import main as validate


def test_a_checkpoint_on_s3_generates_and_is_measured(bucket, tmp_path, capsys):
    model = LlamaForCausalLM(LlamaConfig(**(SHAPE | FAMILIES["llama3"])))
    model.save_pretrained(tmp_path / "hf")
    train_tokenizer(["some text to learn from"] * 9, 300).save(tmp_path / "hf")
    texts = []
    for place in (str(tmp_path / "imported"), f"{bucket}/models/imported"):
        checkpoint_hf(["import", str(tmp_path / "hf"), place])
        generate([place, "--prompt", "some", "--prompt", "a text", "--max-tokens=8", "--temperature=0"])
        texts.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    assert texts[0] == texts[1]
    assert len(texts[0]) == 2
    average([str(tmp_path / "imported"), f"{bucket}/models/imported", f"{bucket}/models/mean"])
    export_model(f"{bucket}/models/mean", tmp_path / "back", dtype="float32")
    back = LlamaForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert all(torch.equal(back[name], weight) for name, weight in model.state_dict().items())
    other = write_dataset(tmp_path / "other", [[[1, 2, 0]]], [[3, 4, 0]])
    with pytest.raises(TitaniteError, match="was made with tokenizer"):
        validate([f"{bucket}/models/imported", "--datasets", str(other), "--seq-len=8"])
    with pytest.raises(TitaniteError, match="no checkpoint in "):
        generate([f"{bucket}/nothing", "--prompt", "a"])


@pytest.mark.usefixtures("harness")
def test_checkpoints_on_s3_are_followed(bucket, tmp_path, settings):  # noqa: F811
    """Of three checkpoints two are left."""
    run = tmp_path / "run"
    launch(1, run, [*settings, f"--checkpoint.folder={bucket}/run", "--checkpoint.keep=2"])
    rows = followed(run)
    assert [row["step"] for row in rows] == [2, 3]
    assert [row["scores/t/acc"] for row in rows] == [score_of(run, step, tmp_path) for step in (2, 3)]

"""Every layout against the plain loop of tools.same, and that loop against torch alone."""

import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

import models
from models import build_model
from models.weights import init_weights
from optim import learning_rate
from parallel.mesh import ParallelDims
from tests.layouts import TABLES, Table, some
from tools.same import SEQUENCES, Layout, Trace, Verdict, compare_layouts, main, open_small, steps_of, train_plainly

ROOT = Path(__file__).parents[2]
WORDS = (f"--config={ROOT}/train_configs/debug.toml", "--data.datasets=[]", "--optimizer.lr=3e-3")


def verdicts(table):
    return dict(compare_layouts([*WORDS, *table.words], table.layouts, **table.shape))


STARTS = {(name, layout.ranks): None for name, table in TABLES.items() for layout in table.layouts.values()}
LONG = {"combined": pytest.mark.long}


@pytest.mark.parametrize(("name", "ranks"), [pytest.param(*start, marks=LONG.get(start[0], ())) for start in STARTS])
def test_every_layout_trains_as_a_plain_loop(name, ranks):
    """One start for all layouts of a table on so many ranks."""
    table = TABLES[name]
    layouts = {key: layout for key, layout in table.layouts.items() if layout.ranks == ranks}
    found = verdicts(table._replace(layouts=layouts))
    assert {layout: verdict for layout, verdict in found.items() if verdict.kind != "same"} == {}
    assert found.keys() == layouts.keys()


def train_by_torch():
    """The same steps by torch's own AdamW and loss, all weights together."""
    config, spec, flavor = given = open_small([*WORDS, "--training.local_batch_size=16"], Layout(1), {})
    settings = config.optimizer
    model = build_model(spec, flavor)
    init_weights(model, torch.device("cpu"), config.run.seed)
    weights = dict(model.named_parameters())
    trace = Trace({name: weight.detach().clone() for name, weight in weights.items()}, [], [], {})
    groups = [
        {"params": [w for w in weights.values() if w.ndim > 1]},
        {"params": [w for w in weights.values() if w.ndim <= 1], "weight_decay": 0.0},
    ]
    betas = settings.beta1, settings.beta2
    optimizer = torch.optim.AdamW(
        groups, betas=betas, eps=settings.eps, weight_decay=settings.weight_decay, foreach=False
    )
    for step, (batch,) in enumerate(steps_of(given, ParallelDims(1, 1), 0), start=1):
        logits = model(batch.tokens).flatten(0, 1)
        labels = batch.labels.flatten()
        loss = F.cross_entropy(logits, labels, reduction="sum") / max((labels >= 0).sum(), 1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), config.training.max_norm)
        trace.losses.append([loss.item()])
        trace.gradients.append({name: weight.grad.clone() for name, weight in weights.items()})
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.training.steps, settings.lr, config.lr_scheduler, SEQUENCES)
        optimizer.step()
        optimizer.zero_grad()
    trace.changes.update({name: weight.detach() - trace.start[name] for name, weight in weights.items()})
    return trace


def test_the_plain_loop_trains_as_torch_does():
    """Also over a step without a label, which has no loss, and whose gradients of 0 are an update like any other."""
    found = train_plainly(open_small(WORDS, Layout(1), {}), torch.device("cpu"))
    expected = train_by_torch()
    assert len(found.losses) == 4
    for step, ((loss,), (theirs,)) in enumerate(zip(found.losses, expected.losses, strict=True)):
        assert loss == pytest.approx(theirs, rel=1e-6), step
    for ours, torchs in zip(found.gradients, expected.gradients, strict=True):
        for name, gradient in ours.items():
            torch.testing.assert_close(gradient, torchs[name], rtol=0, atol=1e-3 * torchs[name].abs().max().item())
    for name, change in found.changes.items():
        assert (change - expected.changes[name]).norm() <= 1e-3 * expected.changes[name].norm(), name


def test_a_refusal_and_a_difference_are_told(capsys, monkeypatch):
    """tp refuses norms over the whole width. A loss that counts ranks is another in each layout."""
    words = [WORDS[0].removeprefix("--config="), *WORDS[1:], "--layouts", "TP 2", "FSDP 2"]
    assert main([*words, "--model.qk_norm=width"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^FSDP 2 +same", said, re.MULTILINE)
    assert re.search(r"^TP 2 +refused +parallelism.tp = 2", said, re.MULTILINE)
    monkeypatch.setattr("trainer.count_trained", lambda *_: torch.tensor(100))
    assert main([word for word in words if word != "TP 2"]) == 1
    assert re.search(r"^FSDP 2 +differs +from step 1: loss", capsys.readouterr().out, re.MULTILINE)


@pytest.fixture
def palm(monkeypatch):
    """The model of docs/model.md's example, which `model.name = "palm"` trains."""
    page = ROOT / "docs" / "model.md"
    of_model, of_models = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    written = ModuleType("models.palm")
    monkeypatch.setitem(sys.modules, "models.palm", written)
    exec(of_model, written.__dict__)
    names = vars(models) | {"partial": partial}
    exec(of_models, names)
    monkeypatch.setattr(models, "MODELS", {**models.MODELS, "palm": names["PALM"]})


@pytest.mark.usefixtures("palm")
def test_a_model_of_a_fork():
    layouts = some("compiled", "CP 2", "PP 2", "TP 2")
    found = verdicts(Table(layouts, ("--model.name=palm",)))
    assert found == {name: Verdict("same") for name in layouts}

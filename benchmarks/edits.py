"""Edits that forks make, each in every layout: computed alike, refused, or shown by tools.same; none silent.

python -m benchmarks.edits [--only "a logit cap in forward"]

An edit is a text in a file and another in its place. It is made in a copy of the project, and one step is trained there
by a plain loop and in the layouts. `expected` has the layouts that are not "same"; --quick tries these and FSDP 2.
"""

import json
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import add_row, build_parser, finish

ROOT = Path(__file__).parents[1]
MODEL, LOSS, OPTIM, MUON = "models/llama/model.py", "loss.py", "optim.py", "muon.py"
# One of each kind; float8, which has another plain loop, only where an edit is about it.
LAYOUTS = ("one process", "loss in chunks", "documents", "DDP 2", "FSDP 2", "TP 2", "CP 2", "CP 2, ring", "PP 2")
FLOAT8 = ("float8", "float8, own kernels")
REFUSED, DIFFERS = "refused", "differs"


class Edit(NamedTuple):
    """What a fork changes: pairs of an old text and a new one, of a file."""

    file: str
    changes: tuple[tuple[str, str], ...]
    expected: dict[str, str] = {}  # noqa: RUF012  # nothing changes it
    layouts: tuple[str, ...] = LAYOUTS
    words: tuple[str, ...] = ()
    seen_by_plain_loop: bool = True  # otherwise all that there is of it are refusals


def edit(file: str, old: str, new: str, expected: dict[str, str] | None = None, **more: Any) -> Edit:
    return Edit(file, ((old, new),), expected or {}, **more)


EVERYWHERE = dict.fromkeys(LAYOUTS, REFUSED)
NORMED = "h = x_BSD if self.norm_after else self.attention_norm(x_BSD)\n"
LOOP = "        for name, block in self.layers.items():\n"
CALL = "                h = block(h, cos, sin, mask)\n"
LOGITS = "        return logits.view(-1, own.shape[0], logits.shape[-1])\n"
EDITS = {
    "a layer's own attention": edit(
        MODEL,
        "        self.attend: Callable[..., Tensor] = attention\n",
        "        self.attend = lambda q, k, v, mask: attention(q / 2, k, v, mask)\n",
        {"CP 2, ring": REFUSED},
    ),
    "a logit cap in forward": edit(
        MODEL, LOGITS, f"        logits = 0.1 * (10 * logits).tanh()\n{LOGITS}", {"loss in chunks": REFUSED}
    ),
    "a logit cap in _compute_logits": edit(
        MODEL, "        return compute(h, weight)\n", "        return 0.1 * (10 * compute(h, weight)).tanh()\n"
    ),
    "AdamW with a double step": edit(MUON, "    update = rate * mean", "    update = 2 * rate * mean"),
    "a window in the mask": edit(
        MODEL, "    return distance >= 0\n", "    return (distance >= 0) & (distance < 4)\n", {"CP 2, ring": REFUSED}
    ),
    "a window in causal_mask": edit(
        MODEL,
        "    return same_document & visible(queries_S[:, None]",
        "    same_document &= queries_S[:, None] - torch.arange(T, device=queries_S.device) < 4\n"
        "    return same_document & visible(queries_S[:, None]",
        {"CP 2, ring": REFUSED},
    ),
    "half the loss": edit(LOSS, "        return terms[0]\n", "        return terms[0] / 2\n", {"TP 2": REFUSED}),
    "a rate by layer": edit(
        OPTIM, '"lr": settings.lr * group.lr,', '"lr": settings.lr * group.lr * (0.5 if ".1." in name else 1.0),'
    ),
    "betas by layer": edit(
        OPTIM, '"betas": tuple(betas.values()),', '"betas": (0.8, 0.9) if ".1." in name else tuple(betas.values()),'
    ),
    "nn.LayerNorm for a norm": edit(
        MODEL,
        "self.attention_norm = RMSNorm(config.dim, config.norm_eps)",
        "self.attention_norm = nn.LayerNorm(config.dim, config.norm_eps)",
    ),
    "nn.init in __init__": edit(
        MODEL,
        "        if config.qk_norm:\n",
        "        nn.init.zeros_(self.wo.weight)\n        if config.qk_norm:\n",
        EVERYWHERE,
        seen_by_plain_loop=False,
    ),
    "a weight without initial values": edit(
        MODEL,
        "        if config.qk_norm:\n",
        "        self.gate = nn.Parameter(torch.full((4,), 8.0))\n        if config.qk_norm:\n",
        EVERYWHERE,
        seen_by_plain_loop=False,
    ),
    "a norm in no plan": Edit(
        MODEL,
        (
            (
                "        self.feed_forward = FeedForward",
                "        self.third_norm = RMSNorm(8)\n        self.feed_forward = FeedForward",
            ),
            (
                "        h = self.feed_forward(h)\n",
                "        h = self.feed_forward(self.third_norm(h.unflatten(-1, (-1, 8))).flatten(-2))\n",
            ),
        ),
        {"TP 2": REFUSED},
    ),
    "slopes by head": edit(
        MODEL,
        "    grouped = q_BNSH.shape[1] != k_BKTH.shape[1]\n",
        "    q_BNSH = q_BNSH * torch.arange(1, q_BNSH.shape[1] + 1).view(1, -1, 1, 1)\n"
        "    grouped = q_BNSH.shape[1] != k_BKTH.shape[1]\n",
        {"TP 2": DIFFERS, "CP 2, ring": REFUSED},
    ),
    "a gate by head": edit(
        MODEL,
        "        out_BNSH = self.attend(q, k, v, mask)\n",
        "        out_BNSH = self.attend(q, k, v, mask)\n"
        "        out_BNSH = out_BNSH * torch.arange(1, out_BNSH.shape[1] + 1).view(1, -1, 1, 1)\n",
        {"TP 2": DIFFERS},
    ),
    "the embedding in every layer": Edit(
        MODEL,
        ((LOOP, f"        x0 = h\n{LOOP}"), (CALL, "                h = block(h + 0.5 * x0, cos, sin, mask)\n")),
        {"PP 2": DIFFERS},
    ),
    "a factor by layer": edit(MODEL, CALL, "                h = block(h * (1 + i), cos, sin, mask)\n"),
    "a shift of tokens": edit(
        MODEL,
        NORMED,
        f"x_BSD = x_BSD + 0.5 * x_BSD.roll(1, -2)\n        {NORMED}",
        {"TP 2": DIFFERS, "CP 2": DIFFERS, "CP 2, ring": DIFFERS},
    ),
    "a norm's result halved": edit(
        MODEL,
        NORMED,
        "h = x_BSD if self.norm_after else self.attention_norm(x_BSD) * 0.5\n",
        {"float8, own kernels": REFUSED},
        layouts=(*LAYOUTS, *FLOAT8),
    ),
    "GELU for SiLU": edit(MODEL, "F.silu(", "F.gelu(", {"float8, own kernels": REFUSED}, layouts=(*LAYOUTS, *FLOAT8)),
    "norms with an offset": edit(
        MODEL,
        "self.normalized_shape, self.weight.to(x.dtype), self.eps)",
        "self.normalized_shape, 1 + self.weight.to(x.dtype), self.eps)",
        {"float8, own kernels": REFUSED},
        layouts=(*LAYOUTS, *FLOAT8),
    ),
    "a linear layer that cuts its input": edit(
        MODEL,
        "F.linear(x, self.weight.to(x.dtype), bias)",
        "F.linear(x.clamp(-1, 1), self.weight.to(x.dtype), bias)",
        dict.fromkeys(FLOAT8, REFUSED),
        layouts=(*LAYOUTS, *FLOAT8),
    ),
    "an embedding that counts its rows": edit(
        MODEL,
        "nn.Embedding(config.vocab_size, config.dim)",
        "nn.Embedding(config.vocab_size, config.dim, scale_grad_by_freq=True)",
        {"one process": DIFFERS, "DDP 2": DIFFERS, "FSDP 2": DIFFERS, "PP 2": DIFFERS, "TP 2": REFUSED}
        | dict.fromkeys(("CP 2", "CP 2, ring"), DIFFERS),
    ),
    "label smoothing": edit(LOSS, 'reduction="sum")', 'reduction="sum", label_smoothing=0.1)', {"TP 2": REFUSED}),
    "a second term of the loss": edit(
        LOSS,
        "    if z_loss:\n        log_sum_BS",
        '    terms["size"] = 0.1 * logits_BSV.float().square().sum()\n    if z_loss:\n        log_sum_BS',
        {"TP 2": REFUSED, "PP 2": REFUSED},
    ),
    "norms are decayed": edit(OPTIM, "settings.weight_decay if weight.ndim >= 2 else 0.0", "settings.weight_decay"),
    "Muon in three steps": edit(MUON, "STEPS = 5", "STEPS = 3", words=("--optimizer.name=muon",)),
    "half of a head rotated": edit(
        MODEL,
        "    return (x * cos + torch.cat((-second, first), dim=-1) * sin).type_as(x_BSNH)\n",
        "    turned = x * cos + torch.cat((-second, first), dim=-1) * sin\n"
        "    return torch.cat((turned[..., ::2], x[..., 1::2]), dim=-1).type_as(x_BSNH)\n",
    ),
}


def try_edit(name: str, given: Edit | None, layouts: tuple[str, ...], words: tuple[str, ...]) -> dict[str, Any]:
    """In a process of its own, which imports the edited project: layout → [verdict, why], and a loss."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "edited"
        ignored = shutil.ignore_patterns(".*", "outputs", "datasets", "tests", "docs", "results", "__pycache__")
        shutil.copytree(ROOT, tree, ignore=ignored)
        if given:
            place = tree / given.file
            text = place.read_text()
            for old, new in given.changes:
                assert old in text, f"{name}: {given.file} has no {old!r}"
                text = text.replace(old, new)
            place.write_text(text)
        os.chdir(tree)
        sys.path[:] = [str(tree), *(place for place in sys.path if place not in ("", str(ROOT)))]
        own = [name for name, module in sys.modules.items() if is_ours(module)]
        for module in own:
            del sys.modules[module]
        return compare(layouts, words)


def is_ours(module: Any) -> bool:
    place = Path(getattr(module, "__file__", None) or "/")
    return place.is_relative_to(ROOT) and ".venv" not in place.parts


def compare(layouts: tuple[str, ...], words: tuple[str, ...]) -> dict[str, Any]:
    import torch

    from tools import same

    torch.set_num_threads(1)
    words = ("--config=train_configs/debug.toml", "--data.datasets=[]", "--optimizer.lr=3e-3", *words)
    one_step = ("--training.steps=1",)
    chosen = {}
    for name in layouts:
        layout = same.LAYOUTS[name]
        chosen[name] = layout._replace(words=(*layout.words, *one_step), reference=(*layout.reference, *one_step))
    found: dict[str, Any] = {name: list(verdict) for name, verdict in same.compare_layouts(words, chosen)}
    try:
        plain = same.train_plainly(same.open_small(words, same.Layout(1, one_step), {}), torch.device("cpu"))
        found["plain"] = [plain.losses[0][0], *(change.norm().item() for change in plain.changes.values())]
    except same.TitaniteError:
        found["plain"] = []
    return found


def in_child(*arguments: Any) -> dict[str, Any]:
    """`try_edit` in a fork of this process, which has torch already."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.write(write, json.dumps(try_edit(*arguments)).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    os.close(write)
    with open(read, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text or b"{}")


def main() -> int:
    parser = build_parser("edits that forks make, in every layout")
    parser.add_argument("--only", nargs="+", default=list(EDITS), choices=list(EDITS), metavar="EDIT")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    import pyarrow  # noqa: F401
    import tokenizers  # noqa: F401
    import torchao.float8  # noqa: F401

    rows: list[dict[str, Any]] = []
    bars: list[tuple[str, bool]] = []
    unedited: dict[tuple[str, ...], Any] = {}
    for name in arguments.only:
        given = EDITS[name]
        if given.words not in unedited:
            unedited[given.words] = in_child(name, None, (), given.words)["plain"]
        layouts = given.layouts
        if arguments.quick:
            layouts = tuple(layout for layout in layouts if layout in ("FSDP 2", *given.expected))
        found = in_child(name, given, layouts, given.words)
        plain = found.pop("plain", None)
        changed = plain != unedited[given.words] if given.seen_by_plain_loop else plain == []
        kinds = {layout: found.get(layout, ["no answer"])[0] for layout in layouts}
        expected = {layout: given.expected.get(layout, "same") for layout in layouts}
        bars.append((f"{name}: as expected {expected}, found {found}", kinds == expected))
        bars.append((f"{name}: an effect on the plain loop, or its refusal", changed))
        add_row(arguments, rows, {"edit": name, **kinds})
    return finish(arguments, rows, bars)


if __name__ == "__main__":
    sys.exit(main())

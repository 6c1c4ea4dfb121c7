"""Text from a trained model.

python generate.py --run outputs/llama-debug-20260101-120000 --prompt "def main("
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import config as settings
from checkpoint.manager import load_model
from config import ConfigError, TitaniteError
from data.tokenizer import load_tokenizer
from models import build_model, find_model
from models.llama.model import KVCache
from parallel.comm import device_type


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: list[int],
    max_tokens: int,
    *,
    device: torch.device,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> Iterator[int]:
    """Yield `max_tokens` token ids that continue `prompt`, one forward each, with a KV cache.

    Temperature 0 takes the likeliest token; `top_k` 0 draws from all.
    """
    generator = torch.Generator(device).manual_seed(seed)
    n_layers = len(model.layers)  # type: ignore[arg-type]
    caches = [KVCache(len(prompt) + max_tokens) for _ in range(n_layers)]
    tokens_BS = torch.tensor([prompt], device=device)
    for _ in range(max_tokens):
        logits_V = model(tokens_BS, caches=caches)[0, -1].float()
        token = sample(logits_V, temperature, top_k, generator)
        yield int(token)
        tokens_BS = token.view(1, 1)


def sample(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    """One token id drawn from softmax(logits / temperature), among the `top_k` likeliest."""
    if temperature == 0:
        return logits_V.argmax()
    if top_k:
        threshold = logits_V.topk(min(top_k, logits_V.numel())).values[-1]
        logits_V = logits_V.masked_fill(logits_V < threshold, -torch.inf)
    return torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator)[0]


def load_run(folder: Path, device: torch.device) -> nn.Module:
    """The model of a run with the weights of its newest checkpoint, on one device. Raises TitaniteError."""
    for name in ("config.toml", "model.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder}: not the folder of a run, it has no {name}")
    config = settings.from_dict(settings.read_toml(folder / "config.toml"))
    vocab_size = json.loads((folder / "model.json").read_text(encoding="utf-8"))["vocab_size"]
    spec, flavor = find_model(dataclasses.replace(config.model, vocab_size=vocab_size), vocab_size)
    model = build_model(spec, flavor).to_empty(device=device)
    load_model(config.checkpoint.folder or str(folder / "checkpoints"), model)
    return model.eval()


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Continue a prompt with the model of a run.")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens to generate (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token (default %(default)s)")
    parser.add_argument("--top-k", type=int, default=50, help="draw among the k likeliest, 0: all (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default %(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.max_tokens < 1 or arguments.temperature < 0 or arguments.top_k < 0:
        parser.error("--max-tokens must be at least 1, --temperature and --top-k at least 0")

    device = torch.device(device_type())
    model = load_run(arguments.run, device)
    tokenizer = load_tokenizer(arguments.run)
    prompt = tokenizer.encode(arguments.prompt)
    if not prompt:
        parser.error("--prompt is empty")
    tokens = []
    for token in generate(
        model,
        prompt,
        arguments.max_tokens,
        device=device,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    ):
        if token == tokenizer.eos_id:
            break
        tokens.append(token)
    print(arguments.prompt + tokenizer.decode(tokens))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except TitaniteError as error:
        sys.exit(f"error: {error}")

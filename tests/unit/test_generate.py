"""Generation: the same greedy tokens as Hugging Face transformers, and sampling as asked."""

import torch

from generate import generate, sample
from tests.unit.test_llama import FAMILIES, hf_model, ours_from


def test_greedy_tokens_equal_transformers() -> None:
    for family in FAMILIES:
        hf = hf_model(family)
        prompt = torch.randint(0, 96, (1, 9), generator=torch.Generator().manual_seed(3))
        hf.generation_config.eos_token_id = None
        mask = torch.ones_like(prompt)  # no token is padding
        expected = hf.generate(prompt, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0)
        tokens = generate(ours_from(hf), prompt[0].tolist(), 24, device=torch.device("cpu"), temperature=0)
        assert list(tokens) == expected[0, 9:].tolist(), family


def test_sampling_follows_the_probabilities_of_the_top_k() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0])
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([sample(logits, 0.7, 2, generator) for _ in range(4000)])
    share = torch.bincount(draws, minlength=4) / len(draws)
    kept = torch.tensor([3.0, 2.0])
    expected = (kept / 0.7).softmax(-1)
    torch.testing.assert_close(share, torch.tensor([0.0, expected[0], expected[1], 0.0]), rtol=0, atol=0.03)
    assert sample(logits, 0, 2, generator) == 1


def test_the_seed_decides() -> None:
    model = ours_from(hf_model("llama3"))
    texts = [list(generate(model, [1, 2], 12, device=torch.device("cpu"), seed=seed)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]

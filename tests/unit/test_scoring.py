"""Log-likelihoods of continuations, as transformers' own logits give them one by one."""

import random

import pytest
import torch

from tests.unit.test_llama import FAMILIES, hf_model, ours_from
from tools.scoring import Pair, log_likelihoods


def random_pairs() -> list[Pair]:
    numbers = random.Random(5)
    lengths = [(1, 1), (9, 4), (30, 1), (3, 20), (12, 12), (50, 7)]
    return [Pair(*([numbers.randrange(96) for _ in range(n)] for n in pair)) for pair in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_transformers(family: str) -> None:
    hf, pairs = hf_model(family), random_pairs()
    with torch.no_grad():  # a continuation that is greedy
        prompt = torch.tensor([pairs[1].context])
        out = hf.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False,
                          eos_token_id=None, pad_token_id=0)  # fmt: skip
        pairs.append(Pair(pairs[1].context, out[0, len(pairs[1].context) :].tolist()))
        expected = []
        for context, continuation in pairs:
            logits = hf(torch.tensor([[*context, *continuation]])).logits[0, len(context) - 1 : -1].double()
            targets = torch.tensor(continuation)
            chosen = logits.log_softmax(-1)[torch.arange(len(targets)), targets]
            expected.append((chosen.sum().item(), bool((logits.argmax(-1) == targets).all())))
    for batch_size in (1, 4):
        scores = log_likelihoods(
            ours_from(hf), pairs, batch_size=batch_size, max_seq_len=256, device=torch.device("cpu")
        )
        assert [score.greedy for score in scores] == [greedy for _, greedy in expected]
        assert scores[-1].greedy
        for score, (value, _) in zip(scores, expected, strict=True):
            assert abs(score.log_likelihood - value) < 1e-4


def test_a_long_context_loses_its_beginning() -> None:
    model, pair = ours_from(hf_model("llama3")), random_pairs()[-1]
    options = {"batch_size": 2, "device": torch.device("cpu")}
    cut = Pair(pair.context[-10:], pair.continuation)
    assert log_likelihoods(model, [pair], max_seq_len=16, **options) == log_likelihoods(
        model, [cut], max_seq_len=256, **options
    )
    with pytest.raises(ValueError, match="a continuation of 7 tokens cannot be scored in 6"):
        log_likelihoods(model, [pair], max_seq_len=6, **options)

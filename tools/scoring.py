"""Log-likelihoods of token sequences, from which multiple-choice benchmarks and perplexity are computed."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn


class Pair(NamedTuple):
    """The tokens `continuation` are scored after the given tokens `context`. Neither is empty."""

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    log_likelihood: float  # of the whole continuation, nats
    greedy: bool  # whether every token of it is the likeliest


@torch.no_grad()
def log_likelihoods(
    model: nn.Module, pairs: Sequence[Pair], *, batch_size: int, max_seq_len: int, device: torch.device
) -> list[Score]:
    """The score of each pair, in the order of `pairs`.

    The model reads the last `max_seq_len` tokens before a pair's last token, so a context that is too long loses its
    beginning. Raises ValueError for a continuation of more than `max_seq_len` tokens. The longest pairs run first, so
    that too little memory shows at once.
    """
    scores: dict[int, Score] = {}
    order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i].context) - len(pairs[i].continuation))
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        rows = [[*pairs[i].context, *pairs[i].continuation][-(max_seq_len + 1) :] for i in batch]
        tokens_BS = torch.zeros(len(rows), max(map(len, rows)) - 1, dtype=torch.int64)
        for row, tokens in enumerate(rows):  # padded at the end, where no token sees it
            tokens_BS[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
        logits_BSV = model(tokens_BS.to(device))
        for row, (i, tokens) in enumerate(zip(batch, rows, strict=True)):
            count = len(pairs[i].continuation)
            if not 0 < count < len(tokens):
                raise ValueError(
                    f"a continuation of {count} tokens cannot be scored in {max_seq_len}, context included"
                )
            targets_T = torch.tensor(tokens[-count:], device=device)
            logits_TV = logits_BSV[row, len(tokens) - 1 - count : len(tokens) - 1].float()
            log_likelihood = logits_TV.log_softmax(-1).gather(1, targets_T[:, None]).sum()
            scores[i] = Score(float(log_likelihood), bool((logits_TV.argmax(-1) == targets_T).all()))
    return [scores[i] for i in range(len(pairs))]

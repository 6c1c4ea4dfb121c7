"""The training loss."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import config as settings

IGNORED = -100  # label of a token that is not trained


def cross_entropy(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Cross-entropy summed over the tokens whose label is not IGNORED, in float32; nats."""
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), labels_BS.flatten(), ignore_index=IGNORED, reduction="sum")


def build_loss(compile: settings.Compile) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss, compiled where the model is: float32 logits then exist only inside the kernel."""
    return torch.compile(cross_entropy, backend=compile.backend) if compile.enable else cross_entropy

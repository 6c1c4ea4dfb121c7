"""Llama 2, 3, 3.1 and 3.2 in plain torch.

Weights have the layout of Hugging Face's checkpoints: rotary embeddings rotate the two halves of a head, so nothing is
permuted when loading or exporting.

Shapes are written with these letters:
    B batch   S sequence   T keys (S, or the filled part of the cache)   D dim   F hidden_dim
    N query heads   K key/value heads   H head_dim   V vocabulary
Tensor parallelism makes one dimension of B and S in hidden states, [B * S, D], and nothing here may tell them apart but
attention.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

# Only on CUDA, where it is used: torch.compile imports the compiler, which takes a second.
compiled_flex_attention = torch.compile(flex_attention) if torch.cuda.is_available() else flex_attention
# Uncompiled it would make the whole boolean [B, S, T], several times.
compiled_block_mask = torch.compile(create_block_mask) if torch.cuda.is_available() else create_block_mask
Mask = Tensor | BlockMask | None  # None: causal
CACHE_STEP = 256  # places by which caches grow: a kernel may have to be built for each length


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How Llama 3.1 stretches the low rotary frequencies (Grattafiori et al. 2024, and its reference code)."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_seq_len: int = 8192


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shape of a Llama. With `vocab_size` 0 the tokenizer decides."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int = 0
    head_dim: int = 0  # 0: dim / n_heads
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)
        if self.n_heads % self.n_kv_heads or self.head_dim % 2:
            raise ValueError(f"n_heads must be a multiple of n_kv_heads and head_dim even: {self}")


class KVCache:
    """Keys and values of one layer, stored at their tokens' positions. It grows as far as it is filled.

    Rows may be at different positions. No token sees what is stored beyond its row's position.
    """

    def __init__(self) -> None:
        self.kv = torch.empty(0)  # [B, 2 K, T, H], first all keys

    def store(self, k_BKSH: Tensor, v_BKSH: Tensor, positions_BS: Tensor, length: int) -> tuple[Tensor, ...]:
        """Store keys and values at `positions_BS`; return the first `length` places, [B, K, T, H]."""
        new = torch.cat((k_BKSH, v_BKSH), dim=1)
        stored = self.kv if self.kv.numel() else new[:, :, :0]
        missing = length - stored.shape[2]
        if missing > 0:  # zeros, since even a masked position must not hold NaN
            stored = F.pad(stored, (0, 0, 0, missing))
        rows_B1 = torch.arange(len(new), device=new.device)[:, None]
        stored[rows_B1, :, positions_BS] = new.transpose(1, 2)
        self.kv = stored
        return stored[:, :, :length].chunk(2, dim=1)


def rope_frequencies(config: LlamaConfig, device: torch.device) -> Tensor:
    """Angle per position by which each pair of a head is rotated, [H / 2], float32 (Su et al. 2021)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_seq_len * frequencies / (2 * math.pi)  # full turns within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: fast, untouched; 0: slow, stretched by the factor
    return frequencies * keep + frequencies / scaling.factor * (1 - keep)


def rope_cos_sin(config: LlamaConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles at every position, each [B or 1, S, 1, H], float32."""
    angles = positions[..., None].float() * rope_frequencies(config, positions.device)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
    return angles.cos(), angles.sin()


def apply_rope(x_BSNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every head by the angles of its position, in float32."""
    x = x_BSNH.float()
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).type_as(x_BSNH)


def causal_mask(positions_BT: Tensor, queries_S: Tensor) -> Tensor | BlockMask:
    """The mask for the tokens at the places `queries_S`: they see what is not after them in their document.

    Documents start where `positions_BT` is 0. A boolean [B, 1, S, T], but on CUDA flex attention's block mask, since
    with a boolean cuDNN's backward on an H100 may give NaN (torch 2.11 to 2.13,
    github.com/pytorch/pytorch/issues/196678).
    """
    documents_BT = (positions_BT == 0).cumsum(dim=1)
    B, T = documents_BT.shape
    S = queries_S.shape[0]
    if positions_BT.is_cuda:

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (queries_S[q] >= k) & (documents_BT[b, queries_S[q]] == documents_BT[b, k])

        return compiled_block_mask(visible, B, None, S, T, device="cuda")
    same_document = documents_BT[:, None, queries_S, None] == documents_BT[:, None, None, :]
    return same_document & (queries_S[:, None] >= torch.arange(T, device=queries_S.device))


def attention(q_BNSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, mask: Mask) -> Tensor:
    """Softmax attention, [B, N, S, H]; causal if `mask` is None."""
    grouped = q_BNSH.shape[1] != k_BKTH.shape[1]
    if isinstance(mask, BlockMask):
        return compiled_flex_attention(q_BNSH, k_BKTH, v_BKTH, block_mask=mask, enable_gqa=grouped)
    if grouped and q_BNSH.dtype == torch.float32 and q_BNSH.is_cuda:
        # No fused kernel there takes both float32 and groups (torch 2.11 to 2.13): all of [B, N, S, T] would be made.
        group = q_BNSH.shape[1] // k_BKTH.shape[1]
        k_BKTH = k_BKTH.repeat_interleave(group, dim=1)
        v_BKTH = v_BKTH.repeat_interleave(group, dim=1)
        grouped = False
    return F.scaled_dot_product_attention(
        q_BNSH, k_BKTH, v_BKTH, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )


class Linear(nn.Linear):
    """Computes in the type of its input, even if its weight is stored in a wider one."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class Output(nn.Linear):
    """The last matmul. With `loss` it returns `loss(hidden states, weight, self.compute)`, for a loss in chunks."""

    @staticmethod
    def compute(x: Tensor, weight: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., D] and the weight [V, D]."""
        return F.linear(x, weight.to(x.dtype))

    def forward(self, x: Tensor, loss: Callable[..., Tensor] | None = None) -> Tensor:
        if loss is None:
            return self.compute(x, self.weight)
        return loss(x, self.weight, self.compute)


class RMSNorm(nn.RMSNorm):
    """Computes in the type of its input, even if its weight is stored in a wider one."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.attend: Callable[..., Tensor] = attention
        self.wq = Linear(config.dim, config.n_heads * config.head_dim, bias=False)
        self.wk = Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wv = Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wo = Linear(config.n_heads * config.head_dim, config.dim, bias=False)

    def forward(
        self, x_BSD: Tensor, cos: Tensor, sin: Tensor, mask: Mask, cache: KVCache | None, positions_BS: Tensor | None
    ) -> Tensor:
        S = cos.shape[1]
        q = self._split_heads(self.wq(x_BSD), S)
        k = self._split_heads(self.wk(x_BSD), S)
        v = self._split_heads(self.wv(x_BSD), S)
        # Rotated before the transpose: after it, they would be copied.
        q = apply_rope(q, cos, sin).transpose(1, 2)
        k = apply_rope(k, cos, sin).transpose(1, 2)
        v = v.transpose(1, 2)
        if cache is not None and positions_BS is not None and mask is not None:
            k, v = cache.store(k, v, positions_BS, mask.shape[-1])
        out_BNSH = self.attend(q, k, v, mask)
        return self.wo(out_BNSH.transpose(1, 2).reshape(*x_BSD.shape[:-1], -1))

    def _split_heads(self, x: Tensor, S: int) -> Tensor:
        """[B, S, this rank's heads, H] of [B, S, heads * H]; with tp, of [B * S, heads * H]."""
        x = x.unflatten(-1, (-1, self.head_dim))
        return x.view(-1, S, *x.shape[-2:])


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.w1 = Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = Linear(config.hidden_dim, config.dim, bias=False)
        self.w3 = Linear(config.dim, config.hidden_dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BSD)) * self.w3(x_BSD))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(
        self,
        x_BSD: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Mask = None,
        cache: KVCache | None = None,
        positions_BS: Tensor | None = None,
    ) -> Tensor:
        h = x_BSD + self.attention(
            self.attention_norm(x_BSD), cos=cos, sin=sin, mask=mask, cache=cache, positions_BS=positions_BS
        )
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    """Build it on the meta device, shard it, then fill it by `models.init.init_weights` or from a checkpoint.

    `compute_dtype` is the type of the residual stream and so of all computation; None: the weights' own. With context
    parallelism `local_indices(S)` gives the places of the tokens this rank holds, and `local_mask` says whether
    attention needs a mask for them. `seq_len` is the length of whole sequences in a pipeline stage whose input, hidden
    states, does not tell it.
    """

    compute_dtype: torch.dtype | None = None
    local_indices: Callable[[int], Tensor] | None = None
    local_mask = True
    seq_len = 0

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        # A pipeline gives the embedding to the first stage, norm and output to the last; others have None.
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(config.vocab_size, config.dim)
        # Keyed by number, so that parameters keep their names when a pipeline stage holds only some layers.
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.norm: RMSNorm | None = RMSNorm(config.dim, config.norm_eps)
        # Tied embeddings have no second parameter: one weight, one name, one shard.
        self.output = None if config.tie_embeddings else Output(config.dim, config.vocab_size, bias=False)

    def forward(
        self,
        x: Tensor,
        positions_BS: Tensor | None = None,
        caches: Sequence[KVCache] | None = None,
        loss: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """Logits [B, S, V] of tokens [B, S]. Between pipeline stages input or result are hidden states.

        With `loss`, a function of the last hidden states, the output's weight and `Output.compute`: what that returns.

        `positions_BS` are the tokens' places in their documents: they restart at 0 with each document, and a token
        sees only its own document. None: one document per row. With `caches` (one per layer) positions do not restart:
        a token sees all that its row has stored up to its position. With context parallelism tokens and positions are
        whole sequences, hidden states and logits only this rank's part.
        """
        S = self.seq_len or x.shape[1]
        device = x.device
        positions = torch.arange(S, device=device)[None] if positions_BS is None else positions_BS
        mask: Mask = None
        if caches:
            filled = (int(positions.max()) // CACHE_STEP + 1) * CACHE_STEP
            mask = torch.arange(filled, device=device) <= positions[:, None, :, None]
        elif self.local_indices is not None:
            own = self.local_indices(S)
            if self.local_mask or positions_BS is not None:
                mask = causal_mask(positions, own)
            positions = positions[:, own]
            if self.tok_embeddings is not None:  # tokens, not a pipeline's hidden states
                x = x[:, own]
        elif positions_BS is not None:
            mask = causal_mask(positions, torch.arange(S, device=device))
        cos, sin = rope_cos_sin(self.config, positions)

        h = x if self.tok_embeddings is None else self.tok_embeddings(x)
        h = h.to(self.compute_dtype or h.dtype)
        for i, block in enumerate(self.layers.values()):
            if caches:
                h = block(h, cos, sin, mask, caches[i], positions)
            else:
                h = block(h, cos, sin, mask)
        if self.norm is None:
            return h
        h = self.norm(h)
        if self.output is not None:
            result = self.output(h) if loss is None else self.output(h, loss)
        else:
            assert self.tok_embeddings is not None, "tied: one weight at both ends"
            weight = self.tok_embeddings.weight
            result = Output.compute(h, weight) if loss is None else loss(h, weight, Output.compute)
        if loss is not None:
            return result
        return result.view(-1, positions.shape[1], result.shape[-1])

    def init_std(self, name: str) -> float | None:
        """Standard deviation of the initial values of parameter `name`; None for norms, which start at 1.

        As in GPT-2, layers that add to the residual stream (wo, w2) are scaled by 1 / sqrt(2 n_layers).
        """
        if "norm" in name:
            return None
        if name.endswith(("wo.weight", "w2.weight")):
            return 0.02 / math.sqrt(2 * self.config.n_layers)
        return 0.02

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations per trained token in forward and backward, without recomputation.

        6 per weight of a matmul, plus 12 * n_layers * n_heads * head_dim * seq_len for attention, as if it were not
        causal. This is the definition of PaLM's appendix B, as in torchtitan, so that figures compare.
        """
        matmul_weights = sum(p.numel() for p in self.parameters())
        if self.output is not None and self.tok_embeddings is not None:
            matmul_weights -= self.tok_embeddings.weight.numel()  # a look-up, no matmul, unless it is also the output
        config = self.config
        return 6 * matmul_weights + 12 * config.n_layers * config.n_heads * config.head_dim * seq_len

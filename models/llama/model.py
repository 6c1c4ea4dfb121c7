"""Llama and its kin in plain torch: Qwen, Mistral, Granite, SmolLM and OLMo are Llamas with a few options.

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
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils._python_dispatch import _disable_current_modes  # a mode would make numbers that cannot be read

# Only on CUDA, where it is used: torch.compile imports the compiler, which takes a second.
compiled_flex_attention = torch.compile(flex_attention) if torch.cuda.is_available() else flex_attention
# Uncompiled it would make the whole boolean [B, S, T], several times.
compiled_block_mask = torch.compile(create_block_mask) if torch.cuda.is_available() else create_block_mask
Mask = Tensor | BlockMask | None  # None: causal
MATRICES = ("tok_embeddings", "wq", "wk", "wv", "wo", "w1", "w2", "w3", "output")  # whose initial values are drawn
PROBED_PLACES = 2**15  # where a changed mask is looked for
CACHE_STEP = 256  # places by which caches grow: a kernel may have to be built for each length


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the rotary angles are changed for contexts longer than `original_seq_len` tokens.

    llama3 slows the low frequencies down by `factor` (Grattafiori et al. 2024, and its reference code). yarn does too,
    and multiplies cosine and sine by `attention_factor` (Peng et al. 2023). linear slows all of them (Chen et al.
    2023).
    """

    kind: str = ""  # llama3; or yarn, linear
    factor: float = 8.0
    original_seq_len: int = 8192
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    # yarn: turns within the original context at and below which a frequency is slowed fully, and at and above which not
    # at all; 0: 1 and 32. The pairs at these bounds are rounded outwards, unless they are exact.
    beta_slow: float = 0.0
    beta_fast: float = 0.0
    exact_bounds: bool = False
    attention_factor: float = 0.0  # yarn; 0: 0.1 ln(factor) + 1
    full_layers_only: bool = False  # layers with a window keep their angles

    def __post_init__(self) -> None:
        if self.kind not in ("", "llama3", "yarn", "linear"):
            raise ValueError(f"rope_scaling.kind = {self.kind!r}: must be llama3, yarn or linear")


class Rope(NamedTuple):
    """Rotary embedding of a layer. `theta` 0: none."""

    theta: float
    head_dim: int
    scaling: RopeScaling | None = None


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shape of a Llama. With `vocab_size` 0 the tokenizer decides. What follows `rope_theta` is off by default."""

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
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = ""  # "head": RMSNorm of each head of q and k; "width": of all their heads together
    norm_after: bool = False  # norms on what attention and feed-forward return, none before them
    # One value per layer, repeated if there are more layers. Empty: the same for all.
    windows: tuple[int, ...] = ()  # how many tokens a token sees, itself included; 0: all before it
    rope_thetas: tuple[float, ...] = ()  # in place of rope_theta; 0: no rotary embedding
    # Factors, where 0 means none.
    embedding_multiplier: float = 0.0
    attention_multiplier: float = 0.0  # of q k, in place of 1 / sqrt(head_dim)
    residual_multiplier: float = 0.0  # of what attention and feed-forward return
    logits_divisor: float = 0.0

    def __post_init__(self) -> None:
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)
        for name in ("windows", "rope_thetas"):  # lists in TOML and JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.rope_scaling, dict):  # in TOML and JSON
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        if self.n_heads % self.n_kv_heads or self.head_dim % 2:
            heads = f"n_heads = {self.n_heads}, n_kv_heads = {self.n_kv_heads}, head_dim = {self.head_dim}"
            raise ValueError(f"n_heads must be a multiple of n_kv_heads and head_dim even: {heads}")
        if self.qk_norm not in ("", "head", "width"):
            raise ValueError(f'qk_norm = {self.qk_norm!r}: must be "", "head" or "width"')

    def window(self, layer: int) -> int:
        """How many tokens a token of this layer sees, itself included; 0: all before it."""
        return self.windows[layer % len(self.windows)] if self.windows else 0

    def rope(self, layer: int) -> Rope:
        """Rotary embedding of this layer."""
        theta = self.rope_theta
        if self.rope_thetas:
            theta = self.rope_thetas[layer % len(self.rope_thetas)]
        scaling = self.rope_scaling
        if not theta or (scaling and scaling.full_layers_only and self.window(layer)):
            scaling = None
        return Rope(theta, self.head_dim, scaling)


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


def rope_frequencies(rope: Rope, device: torch.device) -> Tensor:
    """Angle per position by which each pair of a head is rotated, [H / 2], float32 (Su et al. 2021)."""
    scaling = rope.scaling
    exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.float32, device=device) / rope.head_dim
    if not rope.theta:
        return torch.zeros_like(exponents)
    frequencies = 1.0 / rope.theta**exponents
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        keep = _yarn_keep(rope, scaling, device)
    else:
        turns = scaling.original_seq_len * frequencies / (2 * math.pi)  # full turns within the original context
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: fast, untouched; 0: slow, stretched by the factor
    return frequencies * keep + frequencies / scaling.factor * (1 - keep)


def _yarn_keep(rope: Rope, scaling: RopeScaling, device: torch.device) -> Tensor:
    """How much of its frequency each pair keeps, [H / 2]: a ramp over the pairs, between two numbers of turns."""

    def pair_of(turns: float) -> float:
        wavelengths = scaling.original_seq_len / (turns * 2 * math.pi)
        return rope.head_dim * math.log(wavelengths) / (2 * math.log(rope.theta))

    first = pair_of(scaling.beta_fast or 32.0)
    last = pair_of(scaling.beta_slow or 1.0)
    if not scaling.exact_bounds:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, rope.head_dim - 1)
    if first == last:
        last += 0.001  # as the reference does
    pairs = torch.arange(rope.head_dim // 2, dtype=torch.float32, device=device)
    return 1 - ((pairs - first) / (last - first)).clamp(0, 1)


def rope_cos_sin(rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles at every position, each [B or 1, S, 1, H], float32."""
    angles = positions[..., None].float() * rope_frequencies(rope, positions.device)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
    if rope.scaling is None or rope.scaling.kind != "yarn":
        return angles.cos(), angles.sin()
    factor = rope.scaling.attention_factor or 0.1 * math.log(rope.scaling.factor) + 1
    return angles.cos() * factor, angles.sin() * factor


def apply_rope(x_BSNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every head by the angles of its position, in float32."""
    x = x_BSNH.float()
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).type_as(x_BSNH)


def visible(query: Tensor, key: Tensor, window: int) -> Tensor:
    """Whether a token at the place `query` sees one of its document at the place `key`. Shapes broadcast.

    With a `window` it sees the nearest so many tokens, itself included; 0: all before it.
    """
    distance = query - key
    if window:
        return (distance >= 0) & (distance < window)
    return distance >= 0


def causal_mask(positions_BT: Tensor, queries_S: Tensor, window: int = 0) -> Tensor | BlockMask:
    """The mask for the tokens at the places `queries_S`: they see what is not after them in their document.

    Of that, those that are `visible`. Documents start where `positions_BT` is 0. A boolean [B, 1, S, T], but on CUDA
    flex attention's block mask, since with a boolean cuDNN's backward on an H100 may give NaN (torch 2.11 to 2.13,
    github.com/pytorch/pytorch/issues/196678).
    """
    documents_BT = (positions_BT == 0).cumsum(dim=1)
    B, T = documents_BT.shape
    S = queries_S.shape[0]
    if positions_BT.is_cuda:

        def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            same_document = documents_BT[b, queries_S[q]] == documents_BT[b, k]
            return same_document & visible(queries_S[q], k, window)

        return compiled_block_mask(seen, B, None, S, T, device="cuda")
    same_document = documents_BT[:, None, queries_S, None] == documents_BT[:, None, None, :]
    return same_document & visible(queries_S[:, None], torch.arange(T, device=queries_S.device), window)


def mask_is_causal() -> bool:
    """Whether `causal_mask`, of one document and without a window, is still what attention computes without a mask.

    Tried on a few of many places, on CPU, also where the model is built on another device or for counting alone.
    """
    with _disable_current_modes():
        places = torch.arange(PROBED_PLACES, device="cpu")
        queries = places[[0, 1, 2, 5, 100, 5000, -1]]
        mask = causal_mask(places[None], queries)
        return isinstance(mask, Tensor) and torch.equal(mask, (queries[:, None] >= places)[None, None])


def cache_mask(positions_BS: Tensor, window: int) -> Tensor:
    """The mask for tokens at `positions_BS` of their rows' caches, [B, 1, S, T]. T is filled up to a CACHE_STEP."""
    filled = (int(positions_BS.max()) // CACHE_STEP + 1) * CACHE_STEP
    places = torch.arange(filled, device=positions_BS.device)
    return visible(positions_BS[..., None], places, window)[:, None]


def _build_mask(window: int, positions_BS: Tensor, own: Tensor, masked: bool, caches: Sequence[KVCache] | None) -> Mask:
    if caches:
        return cache_mask(positions_BS, window)
    if masked or 0 < window < positions_BS.shape[1]:
        return causal_mask(positions_BS, own, window)
    return None


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
    """The last matmul, or what else is to be computed of the last hidden states and the weight.

    Sharding has the whole weight here alone, so those who need it come here: `use(hidden states, weight)`.
    """

    @staticmethod
    def compute(x: Tensor, weight: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., D] and the weight [V, D]."""
        return F.linear(x, weight.to(x.dtype))

    def forward(self, x: Tensor, use: Callable[..., Tensor] | None = None) -> Tensor:
        use = use or self.compute
        return use(x, self.weight)


class RMSNorm(nn.RMSNorm):
    """Computes in the type of its input, even if its weight is stored in a wider one."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.qk_norm = config.qk_norm
        self.query_factor = config.attention_multiplier * math.sqrt(config.head_dim)  # `attend` divides by this root
        self.attend: Callable[..., Tensor] = attention
        q_width = config.n_heads * config.head_dim
        k_width = config.n_kv_heads * config.head_dim
        self.wq = Linear(config.dim, q_width, bias=config.qkv_bias)
        self.wk = Linear(config.dim, k_width, bias=config.qkv_bias)
        self.wv = Linear(config.dim, k_width, bias=config.qkv_bias)
        self.wo = Linear(q_width, config.dim, bias=config.o_bias)
        if config.qk_norm:
            of_heads = config.qk_norm == "head"
            self.q_norm = RMSNorm(config.head_dim if of_heads else q_width, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim if of_heads else k_width, config.norm_eps)

    def forward(
        self, x_BSD: Tensor, cos: Tensor, sin: Tensor, mask: Mask, cache: KVCache | None, positions_BS: Tensor | None
    ) -> Tensor:
        S = cos.shape[1]
        q = self.wq(x_BSD)
        k = self.wk(x_BSD)
        if self.qk_norm == "width":
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = self._split_heads(q, S)
        k = self._split_heads(k, S)
        v = self._split_heads(self.wv(x_BSD), S)
        if self.qk_norm == "head":
            q = self.q_norm(q)
            k = self.k_norm(k)
        # Rotated before the transpose: after it, they would be copied.
        k = apply_rope(k, cos, sin).transpose(1, 2)
        v = v.transpose(1, 2)
        if self.query_factor:  # with the rotation, whose result is rounded once
            cos = cos * self.query_factor
            sin = sin * self.query_factor
        q = apply_rope(q, cos, sin).transpose(1, 2)
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
        self.w1 = Linear(config.dim, config.hidden_dim, bias=config.mlp_bias)
        self.w2 = Linear(config.hidden_dim, config.dim, bias=config.mlp_bias)
        self.w3 = Linear(config.dim, config.hidden_dim, bias=config.mlp_bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BSD)) * self.w3(x_BSD))


class Block(nn.Module):
    """Attention, then feed-forward. Each has a norm before it, or with `norm_after` one after it."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.norm_after = config.norm_after
        self.residual_multiplier = config.residual_multiplier
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
        h = x_BSD if self.norm_after else self.attention_norm(x_BSD)
        h = self.attention(h, cos=cos, sin=sin, mask=mask, cache=cache, positions_BS=positions_BS)
        if self.norm_after:
            h = self.attention_norm(h)
        if self.residual_multiplier:
            h = h * self.residual_multiplier
        x_BSD = x_BSD + h
        h = x_BSD if self.norm_after else self.ffn_norm(x_BSD)
        h = self.feed_forward(h)
        if self.norm_after:
            h = self.ffn_norm(h)
        if self.residual_multiplier:
            h = h * self.residual_multiplier
        return x_BSD + h


class Llama(nn.Module):
    """Build it on the meta device, shard it, then fill it by `models.weights.init_weights` or from a checkpoint.

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
        self.always_masks = not mask_is_causal()
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

        With `loss`: what `loss(self._compute_logits, last hidden states, output's weight)` returns.

        `positions_BS` are the tokens' places in their documents: they restart at 0 with each document, and a token
        sees only its own document. None: one document per row. With `caches` (one per layer) positions do not restart:
        a token sees all that its row has stored up to its position. With context parallelism tokens and positions are
        whole sequences, hidden states and logits only this rank's part.
        """
        S = self.seq_len or x.shape[1]
        own = torch.arange(S, device=x.device)
        positions = own[None] if positions_BS is None else positions_BS
        own_positions = positions
        masked = self.always_masks or positions_BS is not None  # documents, or caches
        if self.local_indices is not None:
            own = self.local_indices(S)
            own_positions = positions[:, own]
            masked |= self.local_mask
            if self.tok_embeddings is not None:  # tokens, not a pipeline's hidden states
                x = x[:, own]
        windows = {self.config.window(int(layer)) for layer in self.layers}
        masks = {window: _build_mask(window, positions, own, masked, caches) for window in windows}
        ropes = {self.config.rope(int(layer)) for layer in self.layers}
        angles = {rope: rope_cos_sin(rope, own_positions) for rope in ropes}

        h = x if self.tok_embeddings is None else self.tok_embeddings(x)
        h = h.to(self.compute_dtype or h.dtype)
        if self.config.embedding_multiplier and self.tok_embeddings is not None:
            h = h * self.config.embedding_multiplier
        for name, block in self.layers.items():
            i = int(name)  # in the whole model: a stage of a pipeline begins with another than 0
            cos, sin = angles[self.config.rope(i)]
            mask = masks[self.config.window(i)]
            if caches:
                h = block(h, cos, sin, mask, caches[i], positions)
            else:
                h = block(h, cos, sin, mask)
        if self.norm is None:
            return h
        h = self.norm(h)
        if self.config.logits_divisor:
            h = h / self.config.logits_divisor
        if loss is not None:
            return self._use_output(h, partial(loss, self._compute_logits))
        logits = self._use_output(h, self._compute_logits)
        return logits.view(-1, own.shape[0], logits.shape[-1])

    def _use_output(self, h: Tensor, use: Callable[..., Tensor]) -> Tensor:
        if self.output is not None:
            return self.output(h, use=use)  # by name: a hook of tp passes on only the first without
        assert self.tok_embeddings is not None, "tied: one weight at both ends"
        return use(h, self.tok_embeddings.weight)

    def _compute_logits(self, h: Tensor, weight: Tensor) -> Tensor:
        """Logits [..., V] of the last hidden states [..., D] and the output's weight [V, D]; a loss in chunks too."""
        compute = Output.compute if self.output is None else self.output.compute
        return compute(h, weight)

    def init_weight(self, name: str, weight: Tensor, generator: torch.Generator | None) -> None:
        """Fill a whole weight with its initial values, in place. Raises ValueError for a name without any.

        Norms start at 1 and biases at 0, all else is normal. As in GPT-2, layers that add to the residual stream
        (wo, w2) are scaled by 1 / sqrt(2 n_layers).
        """
        *_, module, kind = ("", *name.split("."))
        if kind == "bias":
            weight.zero_()
        elif module.endswith("norm"):
            weight.fill_(1)
        elif module in MATRICES:
            std = 0.02
            if module in ("wo", "w2"):
                std /= math.sqrt(2 * self.config.n_layers)
            # Clamped, not redrawn: trunc_normal_ is an order of magnitude slower on CPU.
            weight.normal_(0.0, std, generator=generator).clamp_(-3 * std, 3 * std)
        else:
            raise ValueError(f"{name}: has no initial values; give it some in {type(self).__name__}.init_weight")

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations per trained token in forward and backward, without recomputation.

        6 per weight of a matmul, plus 12 * n_heads * head_dim * seq_len per layer for attention, as if it were not
        causal; a window counts in place of seq_len. This is the definition of PaLM's appendix B, as in torchtitan, so
        that figures compare.
        """
        matmul_weights = sum(p.numel() for p in self.parameters())
        if self.output is not None and self.tok_embeddings is not None:
            matmul_weights -= self.tok_embeddings.weight.numel()  # a look-up, no matmul, unless it is also the output
        config = self.config
        seen = sum(min(config.window(i) or seq_len, seq_len) for i in range(config.n_layers))
        return 6 * matmul_weights + 12 * config.n_heads * config.head_dim * seen

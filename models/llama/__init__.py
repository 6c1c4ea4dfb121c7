"""The sizes of Llama and its kin. Shapes are as published with the models, except those marked as ours."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from models.llama.model import LlamaConfig, RopeScaling

llama2 = partial(LlamaConfig, vocab_size=32_000, rope_theta=10_000.0)
llama3 = partial(LlamaConfig, n_kv_heads=8, vocab_size=128_256, rope_theta=500_000.0)
llama3_1 = partial(llama3, rope_scaling=RopeScaling(factor=8.0))
llama3_2 = partial(llama3, rope_scaling=RopeScaling(factor=32.0), tie_embeddings=True)
qwen3 = partial(
    LlamaConfig, n_kv_heads=8, head_dim=128, vocab_size=151_936, rope_theta=1e6, norm_eps=1e-6, qk_norm="head"
)
granite = partial(
    LlamaConfig, n_layers=40, n_kv_heads=8, rope_theta=1e7, tie_embeddings=True,
    embedding_multiplier=12.0, residual_multiplier=0.22,
)  # fmt: skip

FLAVORS: Mapping[str, LlamaConfig] = MappingProxyType(
    {
        # Ours, for trying things out: a step takes milliseconds.
        "tiny": LlamaConfig(dim=64, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=192),
        # Ours: learns Python in minutes on two cores.
        "2M": LlamaConfig(dim=128, n_layers=4, n_heads=2, n_kv_heads=2, hidden_dim=384),
        # Ours, a little larger.
        "debug": LlamaConfig(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, hidden_dim=768),
        # Ours: sizes of GPT-2, small and medium.
        "124M": LlamaConfig(dim=768, n_layers=12, n_heads=12, n_kv_heads=12, hidden_dim=2048, tie_embeddings=True),
        "350M": LlamaConfig(dim=1024, n_layers=24, n_heads=16, n_kv_heads=16, hidden_dim=2816, tie_embeddings=True),
        "1B": llama3_2(dim=2048, n_layers=16, n_heads=32, hidden_dim=8192),
        "3B": llama3_2(dim=3072, n_layers=28, n_heads=24, hidden_dim=8192),
        "8B": llama3(dim=4096, n_layers=32, n_heads=32, hidden_dim=14336),
        "8B_3.1": llama3_1(dim=4096, n_layers=32, n_heads=32, hidden_dim=14336),
        "70B": llama3(dim=8192, n_layers=80, n_heads=64, hidden_dim=28672),
        "70B_3.1": llama3_1(dim=8192, n_layers=80, n_heads=64, hidden_dim=28672),
        "405B": llama3_1(dim=16384, n_layers=126, n_heads=128, hidden_dim=53248),
        # The 1.8B of IBM's and PyTorch's float8 study, as fms-fsdp defines it.
        "1.8B": llama3(dim=2048, n_layers=24, n_heads=16, hidden_dim=7168),
        "llama2_7B": llama2(dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, hidden_dim=11008),
        "llama2_13B": llama2(dim=5120, n_layers=40, n_heads=40, n_kv_heads=40, hidden_dim=13824),
        # Granite 7B has the shape of Llama 2.
        "granite_7B": llama2(dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, hidden_dim=11008),
        "granite3.3_2B": granite(
            dim=2048, n_heads=32, hidden_dim=8192, vocab_size=49_159, attention_multiplier=1 / 64, logits_divisor=8.0
        ),
        "granite3.3_8B": granite(
            dim=4096, n_heads=32, hidden_dim=12800, vocab_size=49_159, attention_multiplier=1 / 128, logits_divisor=16.0
        ),
        "granite4.1_3B": granite(
            dim=2560, n_heads=40, hidden_dim=8192, vocab_size=100_352, attention_multiplier=1 / 64, logits_divisor=10.0
        ),
        "qwen3_0.6B": qwen3(dim=1024, n_layers=28, n_heads=16, hidden_dim=3072, tie_embeddings=True),
        "qwen3_1.7B": qwen3(dim=2048, n_layers=28, n_heads=16, hidden_dim=6144, tie_embeddings=True),
        "qwen3_4B": qwen3(dim=2560, n_layers=36, n_heads=32, hidden_dim=9728, tie_embeddings=True),
        "qwen3_8B": qwen3(dim=4096, n_layers=36, n_heads=32, hidden_dim=12288),
        # Version 0.3, without a window.
        "mistral_7B": LlamaConfig(
            dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, hidden_dim=14336, vocab_size=32_768, rope_theta=1e6
        ),
        "smollm3_3B": LlamaConfig(
            dim=2048,
            n_layers=36,
            n_heads=16,
            n_kv_heads=4,
            hidden_dim=11008,
            vocab_size=128_256,
            norm_eps=1e-6,
            tie_embeddings=True,
            rope_thetas=(5e6, 5e6, 5e6, 0.0),
            rope_theta=5e6,
        ),
        "olmo2_7B": LlamaConfig(
            dim=4096,
            n_layers=32,
            n_heads=32,
            n_kv_heads=32,
            hidden_dim=11008,
            vocab_size=100_352,
            norm_eps=1e-6,
            rope_theta=5e5,
            norm_after=True,
            qk_norm="width",
        ),
        # Ours, of the size in the checkpoint study: layers as the 8B's, half as many again.
        "11B": llama2(dim=4096, n_layers=48, n_heads=32, n_kv_heads=8, hidden_dim=14336),
    }
)

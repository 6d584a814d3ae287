"""Shapes of well-known models by their hub name, for planning before anything is downloaded."""

import functools

from mallm.models.config import Architecture

QWEN3 = functools.partial(Architecture, 151_936, head_dim=128, rope_theta=1e6)
QWEN2 = functools.partial(Architecture, head_dim=128, rope_theta=1e6, qk_norm=False, qkv_bias=True)
LLAMA3 = functools.partial(Architecture, 128_256, rope_theta=5e5, norm_eps=1e-5, qk_norm=False)
SMOLLM2 = functools.partial(Architecture, 49_152, head_dim=64, norm_eps=1e-5, qk_norm=False)

PRESETS: dict[str, Architecture] = {
    'Qwen/Qwen3-0.6B': QWEN3(width=1024, layers=28, heads=16, kv_heads=8, ffn=3072),
    'Qwen/Qwen3-1.7B': QWEN3(width=2048, layers=28, heads=16, kv_heads=8, ffn=6144),
    'Qwen/Qwen3-4B': QWEN3(width=2560, layers=36, heads=32, kv_heads=8, ffn=9728),
    'Qwen/Qwen3-8B': QWEN3(width=4096, layers=36, heads=32, kv_heads=8, ffn=12_288, tied=False),
    'Qwen/Qwen3-14B': QWEN3(width=5120, layers=40, heads=40, kv_heads=8, ffn=17_408, tied=False),
    'Qwen/Qwen3-32B': QWEN3(width=5120, layers=64, heads=64, kv_heads=8, ffn=25_600, tied=False),
    'Qwen/Qwen2.5-0.5B': QWEN2(151_936, width=896, layers=24, heads=14, kv_heads=2, head_dim=64, ffn=4864),
    'Qwen/Qwen2.5-1.5B': QWEN2(151_936, width=1536, layers=28, heads=12, kv_heads=2, ffn=8960),
    'Qwen/Qwen2.5-3B': QWEN2(151_936, width=2048, layers=36, heads=16, kv_heads=2, ffn=11_008),
    'Qwen/Qwen2.5-7B': QWEN2(152_064, width=3584, layers=28, heads=28, kv_heads=4, ffn=18_944, tied=False),
    'Qwen/Qwen2.5-14B': QWEN2(152_064, width=5120, layers=48, heads=40, kv_heads=8, ffn=13_824, tied=False),
    'Qwen/Qwen2.5-32B': QWEN2(152_064, width=5120, layers=64, heads=40, kv_heads=8, ffn=27_648, tied=False),
    'meta-llama/Llama-3.2-1B': LLAMA3(width=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192),
    'meta-llama/Llama-3.2-3B': LLAMA3(width=3072, layers=28, heads=24, kv_heads=8, head_dim=128, ffn=8192),
    'meta-llama/Llama-3.1-8B': LLAMA3(
        width=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14_336, tied=False
    ),
    'meta-llama/Llama-3.1-70B': LLAMA3(
        width=8192, layers=80, heads=64, kv_heads=8, head_dim=128, ffn=28_672, tied=False
    ),
    'HuggingFaceTB/SmolLM2-135M': SMOLLM2(width=576, layers=30, heads=9, kv_heads=3, ffn=1536),
    'HuggingFaceTB/SmolLM2-360M': SMOLLM2(width=960, layers=32, heads=15, kv_heads=5, ffn=2560),
    'HuggingFaceTB/SmolLM2-1.7B': SMOLLM2(width=2048, layers=24, heads=32, kv_heads=32, ffn=8192),
}

"""The shape of a policy network: a few numbers from which every parameter follows."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer of the Llama / Qwen3 family.

    Attributes:
      vocab: number of token ids (V).
      width: residual width (D).
      layers: number of blocks.
      heads, kv_heads: query heads and key/value heads; kv_heads divides heads (grouped-query attention).
      head_dim: width of one head (even, because rotary embedding turns pairs); may differ from width / heads.
      ffn: width of the gated feed-forward layer (F).
      rope_theta: base of the rotary frequencies.
      norm_eps: floor inside the root-mean-square norms.
      qk_norm: normalise queries and keys per head, as Qwen3 does.
      qkv_bias: biases on query, key and value projections, as Qwen2 has.
      tied: the output head is the transposed embedding.
      remat: recompute each block in the backward pass instead of keeping its activations.
    """

    vocab: int
    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 256
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    qk_norm: bool = True
    qkv_bias: bool = False
    tied: bool = True
    remat: bool = False

    def __post_init__(self) -> None:
        for name in ('vocab', 'width', 'layers', 'heads', 'kv_heads', 'head_dim', 'ffn'):
            if vars(self)[name] < 1:
                raise ValueError(f'{name}={vars(self)[name]}: every size must be at least 1')
        if self.heads % self.kv_heads:
            raise ValueError(f'heads={self.heads}, kv_heads={self.kv_heads}: kv_heads must divide heads')
        if self.head_dim % 2:
            raise ValueError(f'head_dim={self.head_dim}: rotary embedding needs an even head_dim')

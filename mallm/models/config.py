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
      rope_factor: the rotary waves are this many times longer (linear scaling), all of them or those rope_band says.
      rope_band: (low, high, tokens): waves shorter than tokens / high stay as they are, those longer than tokens / low
        are stretched, and the ones between blend (Llama 3.1); None stretches all alike.
      norm_eps: floor inside the root-mean-square norms.
      qk_norm: normalise queries and keys per head, as Qwen3 does.
      qkv_bias: biases on query, key and value projections, as Qwen2 has.
      tied: the output head is the transposed embedding.
      context: longest sequence in tokens that may be read, prompt and answer together: the trained positions, or a
        sliding window, within which full attention is the same thing. None sets no limit.
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
    rope_factor: float = 1.0
    rope_band: tuple[float, float, int] | None = None
    norm_eps: float = 1e-6
    qk_norm: bool = True
    qkv_bias: bool = False
    tied: bool = True
    context: int | None = None
    remat: bool = False

    def __post_init__(self) -> None:
        for name in ('vocab', 'width', 'layers', 'heads', 'kv_heads', 'head_dim', 'ffn'):
            if vars(self)[name] < 1:
                raise ValueError(f'{name}={vars(self)[name]}: every size must be at least 1')
        if self.heads % self.kv_heads:
            raise ValueError(f'heads={self.heads}, kv_heads={self.kv_heads}: kv_heads must divide heads')
        if self.head_dim % 2:
            raise ValueError(f'head_dim={self.head_dim}: rotary embedding needs an even head_dim')
        if not (self.rope_factor > 0 and self.rope_theta > 0):
            raise ValueError(f'rope_theta={self.rope_theta}, rope_factor={self.rope_factor}: both must be positive')
        if self.rope_band and not (0 < self.rope_band[0] < self.rope_band[1] and self.rope_band[2] > 0):
            raise ValueError(f'rope_band={self.rope_band}: must be (low, high, tokens) with 0 < low < high, tokens > 0')

    def refuse_beyond_context(self, tokens: int) -> None:
        """Raises ValueError where padded sequences of this many tokens are longer than the context."""
        if self.context is not None and tokens > self.context:
            raise ValueError(
                f'sequences of {tokens} tokens (padding counts) in a context of {self.context}: this policy was not '
                'made for longer ones, or attends in a window there; shorten prompts or max_tokens'
            )

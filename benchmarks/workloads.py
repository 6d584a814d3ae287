"""What `benchmarks.peers` compares on: one GRPO step, described so that every peer can take the same one."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Workload:
    """A randomly initialised model and what one step does with it; float32 throughout, no KL term.

    Attributes:
      title: one line.
      vocab, width, layers, heads, kv_heads, head_dim, ffn: the model; its head is tied to the embedding.
      qk_norm: Qwen3's normed queries and keys; without them it is a Llama.
      groups: new prompts of a step.
      k: answers to each.
      prompt: fewest and most tokens of a prompt.
      new: tokens of every answer, exactly.
      rank: of LoRA adapters (alpha twice that) on all seven projections; 0 trains every parameter.
      peer_samples: answers in a peer's micro-batch; the last of them takes one AdamW step.
      micro: groups in mallm's micro-batch.
      micro_split: the same where each answer is a group of one.
      remat: whether mallm recomputes blocks in the backward pass; the peers never do.
      logits_mib: room for logits in mallm's loss, beyond which it works in chunks.
      peers: who is compared with mallm.
      apart: one process at a time, because all of them together would need too much memory.
      environment: variables that TRL runs with, (name, value).
      target: a whole step of mallm is to be so many times faster than the best peer's.
    """

    title: str
    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    qk_norm: bool
    groups: int
    k: int
    prompt: tuple[int, int]
    new: int
    rank: int
    peer_samples: int
    micro: int
    micro_split: int
    remat: bool
    logits_mib: int
    peers: tuple[str, ...]
    apart: bool
    environment: tuple[tuple[str, str], ...]
    target: float


SMALL = Workload(
    title='T: Qwen3 of 0.66M parameters, 64 prompts of 22 to 32 tokens, K = 8, 8 new tokens, all parameters',
    vocab=512, width=128, layers=4, heads=4, kv_heads=2, head_dim=32, ffn=256, qk_norm=True,
    groups=64, k=8, prompt=(22, 32), new=8, rank=0, peer_samples=512, micro=32, micro_split=256, remat=True,
    logits_mib=64, peers=('TRL',), apart=False, environment=(), target=5.0,
)  # fmt: skip

KEEP_FREED_MEMORY = (
    ('MALLOC_MMAP_MAX_', '0'),
    ('MALLOC_TRIM_THRESHOLD_', '17179869184'),
    ('MALLOC_TOP_PAD_', '268435456'),
)
"""glibc keeps what is freed, so that TRL on S has what mallm gives itself (`cli.keep_memory`)."""

SMOLLM2 = Workload(
    title="S: SmolLM2-135M's shape, 8 prompts of 64 tokens, K = 8, 16 new tokens, LoRA of rank 16",
    vocab=49_152, width=576, layers=30, heads=9, kv_heads=3, head_dim=64, ffn=1536, qk_norm=False,
    groups=8, k=8, prompt=(64, 64), new=16, rank=16, peer_samples=16, micro=4, micro_split=16, remat=False,
    logits_mib=64, peers=('TRL', 'Tunix'), apart=True, environment=KEEP_FREED_MEMORY, target=3.0,
)  # fmt: skip

WORKLOADS = {'T': SMALL, 'S': SMOLLM2}

"""One experiment as a tree of frozen settings, and the one place that turns names into functions."""

import dataclasses
import functools
import math
from typing import Literal

from mallm.algo import Algorithm, credit, losses, schedule
from mallm.config import infinite, require
from mallm.envs.base import Task
from mallm.envs.sokoban_task import SokobanTask
from mallm.learn import pack
from mallm.models.config import Architecture
from mallm.models.lora import TARGETS, Lora
from mallm.overlap import OverlapSettings
from mallm.rollout import tree
from mallm.rollout.engine import RoleSampling, SamplingParams, stop_strings
from mallm.rollout.fleet import Limits
from mallm.rollout.workers import WorkerSettings


@dataclasses.dataclass(frozen=True)
class LoraSettings:
    """A low-rank adapter for each pool over one frozen base that all share; see `mallm.models.lora.Lora`.

    Attributes:
      rank: of the adapters; 0 for none: then each pool trains all parameters of its own.
      alpha: the low-rank product is scaled by alpha / rank.
      rs: scale by alpha / sqrt(rank) instead.
      targets: the projections that are adapted.
    """

    rank: int = 0
    alpha: float = 32.0
    rs: bool = False
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        require(self.rank >= 0, 'lora.rank', self.rank, 'must be 0 (all parameters are trained) or positive')
        Lora(max(1, self.rank), self.alpha, self.rs, self.targets)

    def build(self) -> Lora | None:
        return Lora(self.rank, self.alpha, self.rs, self.targets) if self.rank else None


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """The policy's size, the mesh it is spread over, and what it computes in; see `mallm.models.config.Architecture`.

    Attributes:
      source: a pretrained model: a folder, a .gguf file, a hub id, or 'smollm2'; '' makes a new one of the sizes below.
      thinking: whether a pretrained model whose chat template knows thoughts may write them.
      width, layers, heads, kv_heads, head_dim, ffn: sizes of a new model.
      remat: recompute each block in the backward pass.
      mesh: devices along (data, fsdp, tensor).
      lora: adapters over one base in place of full parameters for each pool.
      dtype: what is computed in; parameters, moments, norms, attention weights and log-probabilities stay float32.
    """

    source: str = ''
    thinking: bool = False
    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 256
    remat: bool = True
    mesh: tuple[int, int, int] = (1, 1, 1)
    lora: LoraSettings = LoraSettings()
    dtype: Literal['float32', 'bfloat16'] = 'float32'

    def __post_init__(self) -> None:
        self.architecture(vocab=1)
        require(min(self.mesh) >= 1, 'mesh', self.mesh, 'every axis has at least one device')

    def architecture(self, vocab: int) -> Architecture:
        return Architecture(
            vocab, self.width, self.layers, self.heads, self.kv_heads, self.head_dim, self.ffn, remat=self.remat
        )


@dataclasses.dataclass(frozen=True)
class SamplingSettings:
    """How training episodes are sampled.

    Attributes:
      mode: 'tree' branches K ways at every role and turn; 'parallel' plays K independent trajectories.
      envs: environment instances in a step.
      k: candidates of a group, or trajectories of an instance.
      turns: most turns of an episode, in training and evaluation.
      temperature: of the first candidate.
      spread: the last candidate of a group is drawn this many times as hot as the first.
      max_tokens: longest answer, the end token included.
      stop: strings that end an answer, in training and evaluation; a comma separates two.
      roles: what is otherwise for one role; top-p and top-k need `algorithm.old_policy='learner'`.
      max_prompt: an episode whose prompt grows longer, in tokens, ends as truncated, unsolved; 0 for no limit.
      choose: which candidate is executed.
      max_fault_share: the run stops when more than this share of a step's episodes fail.
    """

    mode: Literal['tree', 'parallel'] = 'tree'
    envs: int = 128
    k: int = 8
    turns: int = 4
    temperature: float = 1.0
    spread: float = 2.0
    max_tokens: int = 8
    stop: tuple[str, ...] = ()
    roles: dict[str, RoleSampling] = dataclasses.field(default_factory=dict)
    max_prompt: int = 0
    choose: Literal['greedy', 'sampled', 'first'] = 'greedy'
    max_fault_share: float = 0.5

    def __post_init__(self) -> None:
        require(self.envs >= 1, 'envs', self.envs, 'at least one environment is played')
        require(self.k >= 2, 'k', self.k, 'a group needs at least 2 candidates to compare')
        require(self.turns >= 1, 'turns', self.turns, 'an episode has at least one turn')
        require(self.spread >= 1, 'spread', self.spread, 'must be 1 (all candidates alike) or more')
        require(self.temperature > 0, 'temperature', self.temperature, 'training explores: use a positive value')
        for role, own in self.roles.items():
            require(own.temperature != 0, f'roles.{role}.temperature', 0, 'training explores: use a positive value')
        require(self.max_prompt >= 0, 'max_prompt', self.max_prompt, 'must be 0 (no limit) or a number of tokens')
        object.__setattr__(self, 'stop', stop_strings(self.stop))
        SamplingParams(self.max_tokens, stop=self.stop)
        require(0 <= self.max_fault_share <= 1, 'max_fault_share', self.max_fault_share, 'is a share from 0 to 1')


@dataclasses.dataclass(frozen=True)
class AlgorithmSettings:
    """The method: how advantages are formed and what is optimised.

    Attributes:
      credit: 'agent_turn' (AT-GRPO), 'team' (trajectory-level GRPO on the whole return), 'team_outcome' (the same on
        whether the task was solved) or 'parallel_agent_turn' (grouping without a tree).
      normalise: 'std' divides by the group's standard deviation, 'mean' does not, 'loo' compares with the others.
      floor: added to the standard deviation.
      alpha: weight of the team reward.
      clip_low, clip_high: the ratio is clipped to [1 - low, 1 + high].
      old_policy: ratios are taken against the 'sampler's log-probs, or against the 'learner's, computed anew.
      truncate: cap of the importance weights between sampler and learner, where the old policy is the learner's.
      kl: weight of the KL term to the policy as it was after the warm start; 0 keeps no reference.
      entropy: starting weight of the entropy bonus.
      entropy_target: nats steered to at the start and at the end; negative leaves the weight as it is.
      entropy_range: bounds of the controlled weight.
      divisor: 'tokens' averages over the step's tokens, 'constant' divides by groups * K * the longest max_tokens.
      truncated: 'mask' leaves answers that were cut by max_tokens out of the loss and its divisor, 'train' does not;
        both leave them in their group's comparison.
      schedule_period: 0 trains every role at every step; n trains one role at a time for n steps each.
    """

    credit: Literal['agent_turn', 'team', 'team_outcome', 'parallel_agent_turn'] = 'agent_turn'
    normalise: Literal['std', 'mean', 'loo'] = 'std'
    floor: float = 0.1
    alpha: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    old_policy: Literal['sampler', 'learner'] = 'sampler'
    truncate: float = 2.0
    kl: float = 0.0
    entropy: float = 0.1
    entropy_target: tuple[float, float] = (0.8, 0.25)
    entropy_range: tuple[float, float] = (0.02, 0.4)
    divisor: Literal['tokens', 'constant'] = 'constant'
    truncated: Literal['train', 'mask'] = 'train'
    schedule_period: int = 0

    def __post_init__(self) -> None:
        require(self.floor >= 0, 'floor', self.floor, 'the floor of the deviation is 0 or positive')
        require(0 < self.clip_low < 1, 'clip_low', self.clip_low, 'must lie between 0 and 1, e.g. 0.2')
        require(self.clip_high > 0, 'clip_high', self.clip_high, 'must be positive, e.g. 0.28')
        require(self.truncate >= 1, 'truncate', self.truncate, 'a cap below 1 would weaken on-policy data; use 2')
        require(
            self.entropy > 0 or max(self.entropy_target) < 0,
            'entropy',
            self.entropy,
            'a target steers by multiplying the weight: start from a positive one, or set negative targets',
        )
        require(self.kl >= 0, 'kl', self.kl, 'must be 0 (off) or positive')
        require(self.schedule_period >= 0, 'schedule_period', self.schedule_period, 'must be 0 (all learn) or positive')

    def build(self) -> Algorithm:
        """The row of choices that these names stand for."""
        normalisers: dict[str, credit.Normaliser] = {
            'std': functools.partial(credit.standardised, floor=self.floor),
            'mean': credit.centred,
            'loo': credit.leave_one_out,
        }
        normalise = normalisers[self.normalise]
        credits = {
            'agent_turn': credit.agent_turn(normalise, alpha=self.alpha),
            'team': credit.team(normalise),
            'team_outcome': credit.team(normalise, credit.outcome),
            'parallel_agent_turn': credit.parallel_agent_turn(normalise, alpha=self.alpha),
        }
        return Algorithm(
            credit=credits[self.credit],
            objective=functools.partial(
                losses.clipped_surrogate, low=self.clip_low, high=self.clip_high, cap=self.truncate
            ),
            schedule=schedule.rotate(self.schedule_period) if self.schedule_period else schedule.every_role,
            cast=schedule.current,
        )


@dataclasses.dataclass(frozen=True)
class LearningSettings:
    """The optimiser and how groups are cut into its steps.

    Attributes:
      rate: learning rate at the start and at the end of the run (linear in steps).
      pool_rates: the same for single pools that differ from `rate`; (0, 0) freezes one: it plays and never learns.
      warmup: steps over which the rate rises from 0.
      clip, b1, b2, weight_decay: AdamW with gradient clipping by global norm.
      step_groups: live groups in one optimiser step; 0 takes one step for all of them.
      micro_groups: groups in one micro-batch.
      logits_mib: MiB of logits that the loss may hold on one device; where that is too little for a micro-batch, they
        are computed in chunks, and once more in the backward pass.
    """

    rate: tuple[float, float] = (4e-4, 4e-5)
    pool_rates: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    warmup: int = 3
    clip: float = 1.0
    b1: float = 0.9
    b2: float = 0.98
    weight_decay: float = 0.0
    step_groups: int = 64
    micro_groups: int = 32
    logits_mib: int = 64

    def __post_init__(self) -> None:
        for name, rate in {'rate': self.rate, **self.pool_rates}.items():
            require(min(rate) >= 0, name, rate, 'learning rates are 0 or positive')
        require(self.logits_mib >= 1, 'logits_mib', self.logits_mib, 'the loss needs at least 1 MiB; use 64')
        pack.Packing(self.step_groups, self.micro_groups)


@dataclasses.dataclass(frozen=True)
class WarmStartSettings:
    """Supervised training before any reinforcement, from demonstrations that need no solver.

    Attributes:
      steps: optimiser steps of each pool; 0 for none.
      rows: demonstrations in a step.
      rate: learning rate at the start; it falls to 0 linearly.
      cpu_minutes: go on cloning until this much processor time is used, as a control; 0 for `steps` alone.
      transcripts: a JSONL file in place of the task's demonstrations, see `mallm.envs.transcripts`, for the pools
        whose roles it has: it trains all parameters of each, or its adapter over the base as it came.
    """

    steps: int = 50
    rows: int = 64
    rate: float = 3e-3
    cpu_minutes: float = 0.0
    transcripts: str = ''

    def __post_init__(self) -> None:
        require(self.steps >= 0, 'warm_start.steps', self.steps, 'must be 0 (none) or positive')
        require(self.cpu_minutes >= 0, 'warm_start.cpu_minutes', self.cpu_minutes, 'must be 0 (none) or positive')
        require(self.rows >= 1, 'warm_start.rows', self.rows, 'a step needs at least one demonstration')
        require(not self.transcripts or self.steps > 0, 'transcripts', self.transcripts, 'needs warm_start.steps')


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """Held-out evaluation: one path, no tree.

    Attributes:
      every: steps between evaluations on the held-out and strict splits; 0 never.
      boards: boards in each of those evaluations.
      report_boards: boards of the final splits played before and after training for summary.json; a split that has
        fewer is played whole, each board once.
      replays: boards kept as step-by-step replays, before and after.
      roles: what is otherwise for one role than plain sampling with training's max_tokens and stop strings; a
        temperature set here holds in every evaluation of that role, greedy ones too.
      split: 'final' reports on seeds that no tuning saw, 'held_out' on the ones watched while training.
    """

    every: int = 25
    boards: int = 256
    report_boards: int = 1024
    replays: int = 6
    roles: dict[str, RoleSampling] = dataclasses.field(default_factory=dict)
    split: Literal['final', 'held_out'] = 'final'

    def __post_init__(self) -> None:
        require(self.every >= 0, 'evaluation.every', self.every, 'must be 0 (never) or positive')
        require(self.boards >= 1, 'evaluation.boards', self.boards, 'an evaluation plays at least one board')
        require(self.report_boards >= 1, 'evaluation.report_boards', self.report_boards, 'plays at least one board')


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything that determines a run.

    Attributes:
      name: first part of the run folder's name.
      seed: root of all randomness.
      steps: training steps; each plays `sampling.envs` episodes and learns from them.
      cpu_minutes: stop when training has used this much processor time, for comparisons at equal cost; 0 for no limit.
      pools: which policy plays and trains each role; roles that name the same pool share all parameters.
      engine: what samples: 'jax', inside this process, or 'sglang' servers.
      endpoints: file that names the servers of each policy, as `python -m launch.sglang start` writes it; '' starts
        servers on this machine and stops them at the end.
      serving: how much is asked of servers at once, and how their failures are borne.
      save_every: steps between checkpoints.
      runs: folder of the run folders.
      wandb: 'auto' is online when logged in and offline otherwise.
      rollout_workers: Ray actors that play for each learner process, each with an engine of its own or a client of
        that process's servers, which it must reach; 0 plays inside the process. Needs the extra 'ray'.
      worker: what such an actor may take, and when it is given up.
    """

    name: str = 'run'
    seed: int = 0
    steps: int = 400
    cpu_minutes: float = 0.0
    pools: dict[str, str] = dataclasses.field(default_factory=lambda: {'tool': 'shared', 'plan': 'shared'})
    task: Task = SokobanTask()
    model: ModelSettings = ModelSettings()
    sampling: SamplingSettings = SamplingSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    learning: LearningSettings = LearningSettings()
    overlap: OverlapSettings = OverlapSettings()
    warm_start: WarmStartSettings = WarmStartSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    engine: Literal['jax', 'sglang'] = 'jax'
    endpoints: str = ''
    serving: Limits = Limits()
    save_every: int = 25
    runs: str = 'runs'
    wandb: Literal['auto', 'offline', 'online', 'disabled'] = 'auto'
    rollout_workers: int = 0
    worker: WorkerSettings = WorkerSettings()

    def __post_init__(self) -> None:
        require(not (names := infinite(self)), ', '.join(names), math.inf, 'is not finite; use a very large number')
        require(self.steps >= 0, 'steps', self.steps, 'a run has 0 or more steps')
        require(self.cpu_minutes >= 0, 'cpu_minutes', self.cpu_minutes, 'must be 0 (no limit) or positive')
        require(
            not self.endpoints or self.engine == 'sglang', 'endpoints', self.endpoints,
            "names SGLang servers: set engine='sglang' to sample there",
        )  # fmt: skip
        require(self.save_every >= 1, 'save_every', self.save_every, 'steps between checkpoints, at least 1')
        require(
            set(self.pools) == set(self.task.team), 'pools', self.pools,
            f'must name a pool for each role of the team {self.task.team} and for no other',
        )  # fmt: skip
        require(
            (self.sampling.mode == 'tree') == (self.algorithm.credit == 'agent_turn'), 'algorithm.credit',
            self.algorithm.credit, "'agent_turn' goes with sampling.mode='tree', the others with 'parallel'",
        )  # fmt: skip
        for name, roles in (('sampling.roles', self.sampling.roles), ('evaluation.roles', self.evaluation.roles)):
            strange = [role for role, own in roles.items() if role not in self.task.team and own != RoleSampling()]
            require(not strange, name, strange, f'names roles that are not of the team {self.task.team}')
        require(
            self.algorithm.old_policy == 'learner' or not any(p.truncates for p in self.sampler().roles.values()),
            'algorithm.old_policy', self.algorithm.old_policy,
            "with top_p or top_k in training the sampler's log-probs are of another distribution: set it to 'learner'",
        )  # fmt: skip
        require(
            set(self.learning.pool_rates) <= set(self.pools.values()), 'learning.pool_rates', self.learning.pool_rates,
            f'may name the pools {sorted(set(self.pools.values()))} and no other',
        )  # fmt: skip
        require(bool(self.learners), 'learning.pool_rates', self.learning.pool_rates, 'freezes every pool; leave one')
        require('base' not in self.pools.values(), 'pools', self.pools, "'base' is what adapters adapt; rename it")
        require(self.rollout_workers >= 0, 'rollout_workers', self.rollout_workers, 'must be 0 (play here) or positive')
        rows = self.model.mesh[0] * self.model.mesh[1]
        require(
            self.learning.micro_groups % rows == 0, 'learning.micro_groups', self.learning.micro_groups,
            f'must be a multiple of data * fsdp = {rows} of model.mesh',
        )  # fmt: skip
        self.overlap.check(
            old_policy=self.algorithm.old_policy,
            save_every=self.save_every,
            step_groups=self.learning.step_groups,
            mesh=self.model.mesh,
        )

    @property
    def folder_name(self) -> str:
        return f'{self.name}-seed{self.seed}'

    @property
    def learners(self) -> tuple[str, ...]:
        """The roles whose pools are not frozen, in acting order."""
        frozen = {pool for pool, rate in self.learning.pool_rates.items() if not any(rate)}
        return tuple(role for role in self.task.team if self.pools[role] not in frozen)

    @property
    def clones_base(self) -> bool:
        """Whether the warm start trains what the adapters adapt, and not, from transcripts, the adapters."""
        return self.model.lora.rank > 0 and self.warm_start.steps > 0 and not self.warm_start.transcripts

    def packing(self) -> pack.Packing:
        longest = max(params.max_tokens for params in self.sampler().roles.values())
        divisors = {'tokens': pack.token_count, 'constant': pack.constant(longest)}
        learning = self.learning
        return pack.Packing(learning.step_groups, learning.micro_groups, (16, 8), divisors[self.algorithm.divisor])

    def temperatures(self) -> dict[str, tuple[float, ...]]:
        """What each candidate of each role is sampled at in training."""
        candidates = self.sampling.k if self.sampling.mode == 'tree' else 1
        return {role: params.temperatures(candidates) for role, params in self.sampler().roles.items()}

    def sampler(self, temperature: float | None = None) -> tree.Sampler:
        """How episodes are played: in training, or at another temperature for evaluation."""
        s, plain = self.sampling, RoleSampling()
        params = SamplingParams(s.max_tokens, s.temperature, s.spread, stop=s.stop)
        roles = {role: s.roles.get(role, plain).over(params) for role in self.task.team}
        if temperature is not None:
            evaluated = {r: SamplingParams(p.max_tokens, temperature, stop=p.stop) for r, p in roles.items()}
            roles = {role: self.evaluation.roles.get(role, plain).over(p) for role, p in evaluated.items()}
        choices = {'greedy': tree.greedy, 'sampled': tree.sampled, 'first': tree.first}
        return tree.Sampler(s.k, s.turns, self.algorithm.alpha, choices[s.choose], roles, s.max_prompt)

    def keep(self) -> pack.Keep:
        """Which answers are trained on."""
        return {'train': pack.every_answer, 'mask': pack.finished_answers}[self.algorithm.truncated]

"""The nouns of mallm. A Prompt is answered K times, making a Group; groups make a Turn, turns a Trajectory.

Everything here is a frozen host value: no jax, no arrays on a device. The device side begins in `learn.pack`.

Shape letters used in names everywhere:
  B batch rows, T tokens, V vocabulary, K candidates, D model width, F feed-forward width, H heads,
  G groups, P prompt tokens, S answer tokens, L layers.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Message:
    """One chat message: `author` is 'system', 'user' or 'assistant'."""

    author: str
    content: str


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What one role sees: its chat messages and the token ids they become."""

    role: str
    messages: tuple[Message, ...]
    ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Answer:
    """One sampled continuation of a prompt, before the world has judged it.

    Attributes:
      ids: sampled token ids, the end token included when it was sampled.
      logps: log-probability in nats of each id under the distribution it was really drawn from.
      text: the decoded answer without the end token or the stop string that ended it.
      finish: 'stop' (the end token or a stop string) or 'length' (cut at the token limit).
      version: number of weight loads the sampling policy had seen, at the first id.
      spans: (version, how many ids) in order where the weights changed in the middle of the answer; else empty.
    """

    ids: tuple[int, ...]
    logps: tuple[float, ...]
    text: str
    finish: str
    version: int
    spans: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.logps):
            raise ValueError(
                f'{len(self.ids)} ids but {len(self.logps)} log-probs: a sampler owes one log-prob a token'
            )


@dataclasses.dataclass(frozen=True)
class Reward:
    """What one candidate earned, in its parts; `total` mixes them as the paper's eq. for r = alpha * team + local.

    Attributes:
      team: the part every role of the team shares.
      local: the part that judges this role alone.
      terms: named parts of both, for the log only.
    """

    team: float
    local: float
    terms: tuple[tuple[str, float], ...] = ()

    def total(self, alpha: float) -> float:
        return alpha * self.team + self.local

    def is_finite(self) -> bool:
        return math.isfinite(self.team) and math.isfinite(self.local)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An answer and what it earned when it was acted out."""

    answer: Answer
    reward: Reward


@dataclasses.dataclass(frozen=True, order=True)
class GroupKey:
    """The place of a group in the run; unique in a step.

    `sibling` tells parallel (no-tree) trajectories of one environment apart; it is 0 in the tree.
    """

    step: int
    env: int
    sibling: int
    turn: int
    role: str


@dataclasses.dataclass(frozen=True)
class Group:
    """K candidates for ONE prompt: the unit of comparison in GRPO. `chosen` is the index that was executed."""

    key: GroupKey
    policy: str
    prompt: Prompt
    candidates: tuple[Candidate, ...]
    chosen: int


@dataclasses.dataclass(frozen=True)
class Turn:
    """One group for each role that acted, in acting order."""

    groups: tuple[Group, ...]


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One episode of one environment.

    Attributes:
      env: index of the environment instance in its step.
      sibling: which of the parallel trajectories of that instance (0 in the tree).
      turns: the turns played, the last one included.
      solved: the task itself was solved; never merely 'over' or 'out of turns'.
      value: what the last role of each turn earned, in all, used by trajectory-level GRPO. That role moves the world;
        what others earn, for drafts on copies of it, would count the same progress twice.
      frames: text renderings of the world before the first turn and after each turn.
      fault: None, or why the episode must not be trained on.
      truncated: a prompt grew longer than `max_prompt`, which ended the episode: it counts as not solved, and the
        groups played before are sound. The last turn may lack the roles from that one on.
    """

    env: int
    sibling: int
    turns: tuple[Turn, ...]
    solved: bool
    value: float
    frames: tuple[str, ...]
    fault: str | None = None
    truncated: bool = False


@dataclasses.dataclass(frozen=True)
class Credited:
    """A group with one advantage for each of its candidates: what `credit` hands to `route`."""

    group: Group
    advantages: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.advantages) != len(self.group.candidates):
            raise ValueError(f'{len(self.advantages)} advantages for {len(self.group.candidates)} candidates')

"""Whether playing and learning share the time, and with what that goes together."""

import dataclasses
import math

from mallm.config import require


@dataclasses.dataclass(frozen=True)
class OverlapSettings:
    """Playing while the learner computes; see `mallm.pipeline`. By default they take turns.

    Attributes:
      staleness: the next steps' episodes are played ahead, with weights at most so many updates old; 0 plays and learns
        in turn. Needs `algorithm.old_policy='learner'`, and uses the memory of so many more copies of the parameters.
      early: gradients are added up as episodes end, while others of the same step still play: no weights are old, and
        the step is the same up to rounding. Needs `learning.step_groups=0`.
    """

    staleness: int = 0
    early: bool = False

    def __post_init__(self) -> None:
        require(
            self.staleness >= 0, 'overlap.staleness', self.staleness, 'must be 0 (in turn) or a number of updates: 1'
        )
        require(
            not (self.early and self.staleness), 'overlap.early', True,
            'learns from the step that is being played; set it to False, or overlap.staleness to 0',
        )  # fmt: skip

    @property
    def on(self) -> bool:
        return self.staleness > 0 or self.early

    def check(self, *, old_policy: str, save_every: int, step_groups: int, mesh: tuple[int, int, int]) -> None:
        """Refuses what would be unsound, or would do nothing, beside the experiment's other settings."""
        require(
            not self.staleness or old_policy == 'learner', 'algorithm.old_policy', old_policy,
            "overlap.staleness trains on answers of older weights, which importance weights against the learner's own "
            "log-probs must correct: set it to 'learner'",
        )  # fmt: skip
        require(
            not self.staleness or save_every > 1, 'save_every', save_every,
            'nothing is played ahead across a checkpoint: with overlap.staleness use 2 or more',
        )  # fmt: skip
        require(
            not self.early or not step_groups, 'learning.step_groups', step_groups,
            'which groups share an optimiser step would depend on who ends first: with overlap.early use 0',
        )  # fmt: skip
        require(
            not self.on or math.prod(mesh) == 1, 'model.mesh', mesh,
            'programs that two threads start on several devices can lock each other up: with overlap use (1, 1, 1)',
        )  # fmt: skip

    def check_processes(self, count: int) -> None:
        """Refuses a run of several processes, whose collectives must come in one order."""
        name = 'overlap.early' if self.early else 'overlap.staleness'
        require(
            not self.on or count == 1, name, self.early or self.staleness,
            f'goes with one process, and this run has {count}: start one, or leave the setting out',
        )  # fmt: skip

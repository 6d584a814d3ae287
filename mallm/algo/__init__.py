"""An algorithm is a row of pure choices; an ablation changes one cell."""

import dataclasses
from collections.abc import Callable

from mallm.algo import credit, losses, schedule

Coefficient = Callable[[float], float]


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """One method of training a team.

    Attributes:
      credit: the trajectories of a step -> one advantage a candidate.
      objective: token arrays -> summed loss and summed metrics.
      schedule: step -> roles that learn.
      cast: step -> which policy plays each role.
    """

    credit: credit.Credit
    objective: losses.Objective
    schedule: schedule.Schedule
    cast: schedule.Cast

"""An algorithm is a row of pure choices; an ablation changes one cell."""

import dataclasses

from mallm.algo.credit import Credit
from mallm.algo.losses import Objective
from mallm.algo.schedule import Cast, Schedule


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """One method of training a team.

    Attributes:
      credit: the trajectories of a step -> one advantage a candidate.
      objective: token arrays -> summed loss and summed metrics.
      schedule: step -> roles that learn.
      cast: step -> which policy plays each role.
    """

    credit: Credit
    objective: Objective
    schedule: Schedule
    cast: Cast

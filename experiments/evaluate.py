"""Judges a stored run again, with other boards, another temperature, or roles played by other runs' policies.

    python -m experiments.evaluate RUN [--cast ROLE OTHER ...] [--boards N] [--split held_out] [--temperature T]

RUN and OTHER are run folders, or names in runs/; OTHER@ROLE takes the policy of another role. Two roles that were
trained apart and now play together:

    python -m experiments.evaluate runs/ablations/sokoban/alone/tool_alone-seed0 \\
        --cast plan runs/ablations/sokoban/alone/plan_alone-seed0

Cost: what the run's own report costs, without training. Expected: one line of JSON; without --cast, --boards and
--temperature its success and strict are the summary's success_after and strict_after.
"""

import sys
from typing import Annotated, Literal

import tyro

from mallm.cli import keep_memory
from mallm.io import files, watch
from mallm.study.judge import Part, judge


def main(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar='RUN')],
    cast: dict[str, str] | None = None,
    boards: int = 0,
    split: Literal['', 'final', 'held_out'] = '',
    temperature: float = 0.0,
) -> None:
    """Plays a stored run's held-out instances and prints what came out.

    Args:
      run: run folder, or its name in runs/; its task is played, by its own policies where `cast` names no other.
      cast: role and run, as often as wanted; RUN@ROLE is the policy of that role of the run.
      boards: instances of each split; 0 for as many as the run reported on.
      split: the one the run reported on, if not given.
      temperature: 0 is greedy.
    """
    keep_memory()
    try:
        parts = {role: part_of(role, said) for role, said in (cast or {}).items()}
        told = judge(watch.find_run(run), parts, boards=boards, split=split, temperature=temperature)
    except (watch.NothingToShow, FileNotFoundError, ValueError) as refusal:
        sys.exit(str(refusal))
    print(files.dumps(told))


def part_of(role: str, said: str) -> Part:
    """RUN or RUN@ROLE."""
    name, _, other = said.partition('@')
    return Part(watch.find_run(name), other or role)


if __name__ == '__main__':
    tyro.cli(main, description=__doc__)

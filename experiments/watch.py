"""Watch a stored game in the terminal, before or after training.

    python -m experiments.watch RUN [--board N] [--when before|after] [--speed S]

RUN is a folder, or a name in runs/. Cost: none. Expected: the board after every turn, what each role wrote, its reward.
"""

import sys
from typing import Annotated, Literal

import tyro

from mallm.io import watch


def main(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar='RUN')],
    board: int | None = None,
    when: Literal['before', 'after'] = 'after',
    speed: float = 1.0,
) -> None:
    """Plays a stored replay step by step.

    Args:
      run: run folder, or its name in runs/.
      board: number of the held-out instance; the first one stored if not given.
      when: before or after training.
      speed: turns a second, on a terminal.
    """
    try:
        watch.play(run, board=board, when=when, speed=speed)
    except watch.NothingToShow as nothing:
        sys.exit(str(nothing))


if __name__ == '__main__':
    tyro.cli(main)

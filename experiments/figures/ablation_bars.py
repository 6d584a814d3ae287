"""Held-out success of every method or ablation cell after training, mean ± standard error over seeds, beside chance."""

import functools
from collections.abc import Mapping

from mallm.io.gallery import Family, Figure, bars, draw_bars

NAME = 'ablation_bars'


def figure(families: Mapping[str, Family], x: str) -> Figure:
    shown = [bars(family, 'success_after', title=name, x_label='solved') for name, family in families.items()]
    return Figure(NAME, __doc__ or '', tuple(functools.partial(draw_bars, one) for one in shown if one.bars))

"""Figure 6b: turns that a solved held-out instance took, while training, mean ± standard error over seeds."""

from collections.abc import Mapping

from mallm.io.gallery import Family, Figure, curve, of_panels

NAME = 'turns_to_solve'


def figure(families: Mapping[str, Family], x: str) -> Figure:
    panels = [
        curve(family, 'turns_to_solve', x=x, title=name, y_label='turns of a solved instance')
        for name, family in families.items()
    ]
    return of_panels(NAME, __doc__, panels, x=x)

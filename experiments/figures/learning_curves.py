"""Figure 1: held-out success while training, one line a method, mean ± standard error over seeds."""

from collections.abc import Mapping

from mallm.io.gallery import Family, Figure, curve, of_panels

NAME = 'learning_curves'


def figure(families: Mapping[str, Family], x: str) -> Figure:
    panels = [
        curve(family, metric, x=x, title=f'{name}: {split}', y_label='solved', share=True)
        for name, family in families.items()
        for metric, split in (('success', 'held-out'), ('strict', 'strict split'))
    ]
    return of_panels(NAME, f'{__doc__} Greedy, one path.', panels, x=x)

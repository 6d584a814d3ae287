"""Which roles learn at a step, and who plays them."""

from collections.abc import Callable, Mapping, Sequence

Schedule = Callable[[int, Sequence[str]], Sequence[str]]
Cast = Callable[[int, Mapping[str, str]], Mapping[str, str]]


def every_role(step: int, roles: Sequence[str]) -> Sequence[str]:
    """All roles learn at every step."""
    return roles


def rotate(period: int) -> Schedule:
    """One role at a time learns, each for `period` steps in turn; the others are frozen meanwhile."""
    if period < 1:
        raise ValueError(f'period={period}: a role must learn for at least one step; use 1 or more')

    def schedule(step: int, roles: Sequence[str]) -> Sequence[str]:
        return (roles[step // period % len(roles)],)

    return schedule


def current(step: int, pools: Mapping[str, str]) -> Mapping[str, str]:
    """Every role is played by the pool that trains it."""
    return pools

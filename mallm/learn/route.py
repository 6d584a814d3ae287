"""Each group goes to the pool that played it, if its role is learning now; and what a step's groups say."""

from collections import defaultdict
from collections.abc import Sequence

from mallm.algo.credit import is_dead
from mallm.types import Credited


def route(credited: Sequence[Credited], roles: Sequence[str]) -> dict[str, list[Credited]]:
    """{policy: live groups of learning roles}. Dead groups are left out: they hold no signal, and with a KL or entropy
    term they would still move the weights (the policy documented here is that they do not)."""
    routed: dict[str, list[Credited]] = defaultdict(list)
    for item in credited:
        if item.group.key.role in roles and not is_dead(item):
            routed[item.group.policy].append(item)
    return dict(routed)


def dead_shares(credited: Sequence[Credited]) -> dict[str, float]:
    """Share of dead groups of each role."""
    by_role: dict[str, list[bool]] = defaultdict(list)
    for item in credited:
        by_role[item.group.key.role].append(is_dead(item))
    return {role: sum(dead) / len(dead) for role, dead in by_role.items()}


def answer_metrics(credited: Sequence[Credited], *, alpha: float) -> dict[str, float]:
    """Rewards, their terms and lengths (tokens) of each role's answers: of all, those left out of the loss too."""
    values: dict[str, list[float]] = defaultdict(list)
    for item in credited:
        role = item.group.key.role
        for candidate in item.group.candidates:
            values[f'reward/{role}'].append(candidate.reward.total(alpha))
            values[f'truncated/{role}'].append(candidate.answer.finish == 'length')
            values[f'tokens/{role}'].append(len(candidate.answer.ids))
            for name, value in candidate.reward.terms:
                values[f'terms/{role}/{name}'].append(value)
    lengths = {name.removeprefix('tokens/'): some for name, some in values.items() if name.startswith('tokens/')}
    return {
        **{name: sum(some) / len(some) for name, some in values.items()},
        **{f'tokens_min/{role}': float(min(some)) for role, some in lengths.items()},
        **{f'tokens_max/{role}': float(max(some)) for role, some in lengths.items()},
    }

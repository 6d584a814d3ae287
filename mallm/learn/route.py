"""Each group goes to the pool that played it, if one of the roles it trains is learning now."""

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

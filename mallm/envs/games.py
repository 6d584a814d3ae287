"""What the games of a tool and a plan have in common: who may play them, and in which style they are spoken to."""

from mallm.envs import sandbox

MARKS = {'tool': 'T', 'plan': 'P', 'solo': 'S'}
"""The first sign of a prompt to the tiny policy."""


def require_team(team: tuple[str, ...]) -> None:
    """Raises ValueError for a team that could not act."""
    unknown = [role for role in team if role not in MARKS]
    if unknown or not team or ('tool' in team and 'plan' not in team):
        raise ValueError(
            f"team={team}: roles are 'tool', 'plan' and 'solo', and a tool needs a plan to act; use "
            "('tool', 'plan'), ('plan',) or ('solo',)"
        )


def about(style: str) -> tuple[str, ...]:
    """What a run says at its start: the walls around programs, where the tool writes any."""
    return (str(sandbox.shared().walls),) if style == 'text' else ()

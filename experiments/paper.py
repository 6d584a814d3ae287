"""What the paper reports, in percent, for Qwen3-1.7B and Qwen3-8B; None where we have not seen the number.

Source: Zhao et al., arXiv 2510.11062 (ICLR 2026: Stronger-MAS), tables 1, 2, 4 and 6; the row "MAS + GRPO" was added
in its fourth version and is known to us for 8B from notes on the paper. One run each, no error bars; Sudoku there does
not keep the givens. These models are thousands of times larger than ours, and the numbers stand
beside ours for the order of the methods only.
"""

SMALL: dict[str, dict[str, float | None]] = {
    'sudoku': {
        'single agent': 7.0, 'single agent + GRPO': 29.0, 'MAS': 69.0, 'MAS + GRPO': None,
        'MAS + AT-GRPO, shared': 99.0, 'MAS + AT-GRPO, per role': 99.0,
    },
    'sokoban': {
        'single agent': 0.0, 'single agent + GRPO': 3.0, 'MAS': 0.0, 'MAS + GRPO': None,
        'MAS + AT-GRPO, shared': 10.0, 'MAS + AT-GRPO, per role': 11.5,
    },
    'plan_path': {
        'single agent': 5.0, 'single agent + GRPO': 11.0, 'MAS': 10.0, 'MAS + GRPO': None,
        'MAS + AT-GRPO, shared': 96.0, 'MAS + AT-GRPO, per role': 97.0,
    },
}  # fmt: skip
"""Table 1: Qwen3-1.7B."""

LARGE: dict[str, dict[str, float | None]] = {
    'sudoku': {
        'single agent': 48.0, 'single agent + GRPO': 54.0, 'MAS': 72.0, 'MAS + GRPO': 99.0,
        'MAS + AT-GRPO, shared': 99.5, 'MAS + AT-GRPO, per role': 99.0,
    },
    'sokoban': {
        'single agent': 9.0, 'single agent + GRPO': 14.0, 'MAS': 16.0, 'MAS + GRPO': 30.0,
        'MAS + AT-GRPO, shared': 96.0, 'MAS + AT-GRPO, per role': 98.0,
    },
    'plan_path': {
        'single agent': 12.0, 'single agent + GRPO': 47.0, 'MAS': 71.0, 'MAS + GRPO': 96.0,
        'MAS + AT-GRPO, shared': 93.0, 'MAS + AT-GRPO, per role': 96.0,
    },
}  # fmt: skip
"""Table 2: Qwen3-8B."""

TRAINED_ALONE: dict[str, dict[str, float | None]] = {
    'plan_path': {
        'tool_alone': 11.0, 'plan_alone': 14.5, 'alone_then_together': 16.0, 'together': 96.0, 'swapped': 6.0,
    },
}  # fmt: skip
"""Table 4: Qwen3-1.7B on Plan-Path."""
ALONE_NOTE = """The paper judges tool_alone and plan_alone without a partner; ours play beside a partner who stays the
cloned beginner. Those two rows ask different questions and are not to be compared with the paper's."""

OUTCOME_ONLY: dict[str, dict[str, float | None]] = {
    'sokoban': {'task.reward=oracle': 96.0, 'task.reward=outcome': 93.0},
    'sudoku': {'task.reward=oracle': 99.5, 'task.reward=outcome': 99.5},
    'plan_path': {'task.reward=oracle': 93.0, 'task.reward=outcome': 89.0},
}
"""Table 6: Qwen3-8B, shared policy; dense reward against outcome only."""

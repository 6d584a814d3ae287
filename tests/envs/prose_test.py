"""What the games read out of an answer in prose: the last line that is meant, and nothing that was only thought."""

import pytest

from mallm.envs.prose import LONGEST, final_answer


@pytest.mark.parametrize(
    'text, answer',
    [
        ('So.\n#### ["R"]', '["R"]'),
        ('#### ["L"]\n#### ["R"]', '["R"]'),
        ('["L"]\nno', '["L"]'),
        ('<think>\n#### ["R"]', None),  # cut off at the limit of tokens
        ('<think>\n#### ["R"]\n</think>\nNothing.', None),
        ('<think>\n#### ["R"]\n</think>\n#### ["L"]', '["L"]'),
        ('<think>a</think>\n#### ["L"]\n<think>\n#### ["R"]', '["L"]'),
        ('<think>\n' + 'x' * LONGEST + '\n#### ["R"]', None),
    ],
)
def test_the_answer_is_what_follows_the_last_mark_after_the_thoughts(text, answer):
    assert final_answer(text) == answer

"""Text and ids: exact both ways, one chat template on every path, and nothing added to what was written (A12, A13)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallm.envs.sokoban_task import SokobanTask
from mallm.rollout.chat import TinyTokenizer, prompt_for
from mallm.types import Message

TOKENIZER = TinyTokenizer()


@given(st.text(alphabet=TinyTokenizer.ALPHABET))
def test_text_to_ids_and_back_is_exact_one_token_a_character(text):
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text) and TOKENIZER.decode(ids) == text


@given(st.lists(st.integers(0, len(TOKENIZER) - 1)))
def test_any_sampled_ids_can_be_decoded_and_encoded_again_but_for_padding_and_end(ids):
    said = [i for i in ids if i not in (TOKENIZER.PAD, TOKENIZER.end)]
    assert list(TOKENIZER.encode(TOKENIZER.decode(ids))) == said


def test_ids_are_dense_and_padding_and_end_are_no_character():
    ids = TOKENIZER.encode(TinyTokenizer.ALPHABET)
    assert sorted(ids) == list(range(2, len(TOKENIZER))) and {TOKENIZER.PAD, TOKENIZER.end} == {0, 1}
    assert TOKENIZER.decode([TOKENIZER.PAD, TOKENIZER.end]) == ''


def test_a_chat_is_its_contents_and_one_mark_after_which_the_role_writes():
    """A13: no token is prepended, on any path."""
    messages = (Message('system', 'T#'), Message('user', '@$'))
    prompt = prompt_for('tool', messages, TOKENIZER)
    assert prompt.ids == TOKENIZER.chat(messages) == TOKENIZER.encode('T#@$>')
    assert (prompt.role, prompt.messages) == ('tool', messages)


def test_a_character_outside_the_alphabet_is_named_with_a_remedy():
    with pytest.raises(ValueError, match=r"\['ä', '中'\].*use a world that speaks it, or another tokenizer"):
        TOKENIZER.encode('R中ä')


def test_all_that_the_shipped_task_shows_and_demonstrates_can_be_encoded():
    task = SokobanTask()
    for seed in range(30):
        world = task.train(seed)
        for text in ('RRUL', 'DDDDDDDDDDDD', '####@$', ''):
            assert prompt_for('tool', world.observe('tool'), TOKENIZER).ids
            shown, _ = world.act('tool', text)
            assert prompt_for('plan', shown.observe('plan'), TOKENIZER).ids
        for one in task.demonstrations(seed):
            assert TOKENIZER.decode(TOKENIZER.encode(one.text)) == one.text

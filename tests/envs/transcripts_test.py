"""A user's transcripts are read line by line, and refused with file, line, rule and remedy."""

import json

import pytest

from mallm.envs.base import Demonstration
from mallm.envs.data import DataError
from mallm.envs.transcripts import read
from mallm.types import Message

GOOD = {
    'role': 'tool',
    'messages': [{'author': 'system', 'content': 'Be short.'}, {'author': 'user', 'content': '3 × 4?'}],
    'text': '3 * 4',
    'rating': 5,
}


def test_a_line_is_what_a_role_was_shown_and_wrote_and_other_fields_are_left_unread(tmp_path):
    (tmp_path / 'mine.jsonl').write_text('\r\n'.join(json.dumps(GOOD | {'text': text}) for text in ('a', 'b')))
    shown = (Message('system', 'Be short.'), Message('user', '3 × 4?'))
    assert read(str(tmp_path / 'mine.jsonl'), ('tool', 'plan')) == (
        Demonstration('tool', shown, 'a'),
        Demonstration('tool', shown, 'b'),
    )


@pytest.mark.parametrize(
    'line, said',
    [
        ('{"role": ', 'Expecting value'),
        ('', 'Expecting value'),
        ('[]', 'is list, not dict'),
        (b'\xff', "can't decode byte 0xff"),
        (GOOD | {'role': 'critic'}, r"role='critic': is not of the team \('tool', 'plan'\)"),
        (GOOD | {'text': None}, "field 'text': is NoneType, not str"),
        ({'role': 'tool', 'text': 'a'}, "field 'messages' is missing"),
        (GOOD | {'messages': []}, 'a role is shown at least one message'),
        (GOOD | {'messages': ['Be short.']}, "field 'messages': is str, not dict"),
        (GOOD | {'messages': [{'role': 'user', 'content': 'a'}]}, "field 'messages': .*field 'author' is missing"),
        (GOOD | {'messages': [{'author': 'human', 'content': 'a'}]}, r"author=\['human'\]: must be one of"),
    ],
)
def test_a_bad_line_is_refused_by_its_number_with_the_rule_and_the_remedy(line, said, tmp_path):
    bad = line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
    (tmp_path / 'mine.jsonl').write_bytes(json.dumps(GOOD).encode() + b'\n' + bad + b'\n')
    with pytest.raises(DataError, match=rf'mine.jsonl, line 2: .*{said}.*; correct or remove that line'):
        read(str(tmp_path / 'mine.jsonl'), ('tool', 'plan'))


def test_a_file_that_is_absent_or_empty_is_refused(tmp_path):
    with pytest.raises(DataError, match='no such file of transcripts'):
        read(str(tmp_path / 'mine.jsonl'), ('tool',))
    (tmp_path / 'mine.jsonl').touch()
    with pytest.raises(DataError, match=r'mine\.jsonl: is empty'):
        read(str(tmp_path / 'mine.jsonl'), ('tool',))

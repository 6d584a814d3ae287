"""Sets of problems are read in their authors' form, refused with file, row and field, and kept apart from the tests."""

import base64
import dataclasses
import hashlib
import json
import os
import pickle
import zlib

import pyarrow
import pyarrow.parquet
import pytest

from mallm.envs import data
from mallm.envs.base import FINAL, FINAL_STRICT, HELD_OUT, STRICT
from mallm.envs.code import CodeTask
from mallm.envs.data import DataError, Order, decontaminated, load
from mallm.envs.math import MathTask
from mallm.envs.problems import CodeProblem, MathProblem
from mallm.evaluate import available
from mallm.rollout.workers import Seeded, made


def lcb_packed(tests: list[dict]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


ROWS = {
    'polaris': {'problem': 'What is 1 + 1?', 'answer': '2', 'difficulty': '3/8'},
    'dapo_math': {
        'data_source': 'math_dapo',
        'prompt': [{'role': 'user', 'content': 'Solve the following math problem step by step. The last line is so.'
                    '\n\nWhat is 1 + 1?\n\nRemember to put your answer on its own line after "Answer:".'}],
        'ability': 'MATH',
        'reward_model': {'ground_truth': '2', 'style': 'rule-lighteval/MATH_v2'},
        'extra_info': {'index': 'abc'},
    },
    'aime_2024': {'ID': '2024-I-1', 'Problem': 'What is 1 + 1?', 'Solution': 'Count.', 'Answer': 2},
    'aime_2025': {'id': '0', 'problem': 'What is 1 + 1?', 'answer': '2', 'solution': '', 'year': '2025'},
    'olympiad_bench': {'id': 5, 'question': 'What is 1 + 1?', 'final_answer': ['$2$'], 'error': None,
                       'is_multiple_answer': False, 'unit': None, 'answer_type': 'Numerical'},
    'apps': {'problem_id': 7, 'question': 'Double it.', 'difficulty': 'interview', 'starter_code': '',
             'input_output': json.dumps({'inputs': ['1\n', ['2', '3']], 'outputs': ['2\n', ['4', '6']]}),
             'solutions': json.dumps(['print(2 * int(input()))'])},
    'code_contests': {'name': '1_A. Double', 'description': 'Double it.', 'difficulty': 7,
                      'public_tests': {'input': ['1\n'], 'output': ['2\n']},
                      'private_tests': {'input': ['2\n'], 'output': ['4\n']},
                      'generated_tests': {'input': [], 'output': []},
                      'solutions': {'language': [2, 3], 'solution': ['int main(){}', 'print(2 * int(input()))']},
                      'incorrect_solutions': {'language': [3], 'solution': ['print(2)']}},
    'live_code_bench': {
        'question_title': 'double', 'question_content': 'Double it.', 'platform': 'atcoder', 'question_id': 'abc_a',
        'starter_code': '', 'difficulty': 'easy', 'metadata': '{}',
        'public_test_cases': json.dumps([{'input': '1\n', 'output': '2\n', 'testtype': 'stdin'}]),
        'private_test_cases': lcb_packed([{'input': '2\n', 'output': '4\n', 'testtype': 'stdin'}]),
    },
}  # fmt: skip
GOLDEN = 'print(2 * int(input()))'
TESTS = (('1\n', '2\n'), ('2\n', '4\n'))
WANTED = {
    'polaris': MathProblem('polaris-0', 'What is 1 + 1?', '2', 5),
    'dapo_math': MathProblem('abc', 'What is 1 + 1?', '2'),
    'aime_2024': MathProblem('2024-I-1', 'What is 1 + 1?', '2'),
    'aime_2025': MathProblem('0', 'What is 1 + 1?', '2'),
    'olympiad_bench': MathProblem('5', 'What is 1 + 1?', '2'),
    'apps': CodeProblem('7', 'Double it.', (('1\n', '2\n'), ('2\n3', '4\n6')), GOLDEN, (), 2),
    'code_contests': CodeProblem(
        '1_A. Double', 'Double it.', (('1\n', '2\n'), ('2\n', '4\n')), GOLDEN, ('print(2)',), 7
    ),
    'live_code_bench': CodeProblem('abc_a', 'Double it.', TESTS, None, (), 1),
}


def stored(folder, kind: str, rows: list, suffix: str = '.jsonl') -> str:
    path = folder / f'{kind}{suffix}'
    if suffix == '.parquet':
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return f'{kind}:{path}'


@pytest.mark.parametrize('suffix', ['.jsonl', '.parquet'])
@pytest.mark.parametrize('kind', WANTED)
def test_a_row_of_each_of_the_papers_sets_becomes_its_problem(kind, suffix, tmp_path):
    name = stored(tmp_path, kind, [ROWS[kind]], suffix)
    problems, manifest = load(name)
    assert problems == (WANTED[kind],)
    sha = hashlib.sha256((tmp_path / f'{kind}{suffix}').read_bytes()).hexdigest()
    assert (manifest.sha256, manifest.rows, manifest.kept, manifest.skipped) == (sha, 1, 1, ())
    assert manifest.licence and manifest.split == data.SETS[kind].split


@pytest.mark.parametrize(
    'kind, change, says',
    [
        ('polaris', {'problem': None}, "polaris.jsonl, row 1, .*'problem': is NoneType"),
        ('aime_2024', {'Answer': [2]}, "row 1, .*'Answer': is list"),
        ('apps', {'input_output': '{'}, "row 1, .*'input_output': Expecting"),
        ('apps', {'input_output': '{"inputs": ["1"], "outputs": []}'}, 'row 1, .*two lists of one length'),
        ('live_code_bench', {'private_test_cases': 'AAAA'}, "row 1, .*'private_test_cases': cannot be unpacked"),
        ('dapo_math', {'reward_model': {}}, "row 1, .*'ground_truth' is missing"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_with_file_row_and_field(kind, change, says, tmp_path):
    with pytest.raises(DataError, match=says):
        load(stored(tmp_path, kind, [ROWS[kind], ROWS[kind] | change]))


JUNK = (None, 5, -1.5, 'x', '', [], {}, [5], [None], {'a': 1}, '[]', '{}', 'null', '5', '[' * 99_999, '1' * 5000)


@pytest.mark.parametrize('kind', WANTED)
def test_whatever_a_field_holds_the_row_is_read_skipped_or_refused_by_the_fields_name(kind, tmp_path):
    refused = {}
    for name in ROWS[kind]:
        for value in JUNK:
            load.cache_clear()
            try:
                load(stored(tmp_path, kind, [ROWS[kind], ROWS[kind] | {'other': 1, name: value}]))
            except DataError as error:
                refused[str(error)] = name
    assert all(f'{kind}.jsonl, row 1' in said and name in said for said, name in refused.items())
    assert len(refused) > 5


def test_a_test_with_more_digits_than_python_reads_is_kept_as_it_is_written(tmp_path):
    many = '7' * 5000
    row = ROWS['apps'] | {'input_output': f'{{"inputs": [[12, {many}]], "outputs": [{many}]}}'}
    problems, manifest = load(stored(tmp_path, 'apps', [row]))
    assert problems[0].tests == ((f'12\n{many}', many),) and manifest.skipped == ()
    (tmp_path / 'whole.jsonl').write_text(json.dumps(ROWS['apps'])[:-1] + f', "other": {many}}}')
    assert load(f'apps:{tmp_path}/whole.jsonl')[1].kept == 1


@pytest.mark.parametrize(
    'file, content, says',
    [
        ('a.json', b'[{}, 5]', r"a.json, row 0, as 'polaris': field 'problem' is missing"),
        ('b.json', json.dumps([ROWS['polaris'], 5]).encode(), r'b.json, row 1: a row is an object .*is int, not dict'),
        ('c.json', b'{}', r'c.json, row 0: is no json: it is no list'),
        ('d.json', b'[', r'd.json, row 0: is no json: Expecting'),
        ('e.jsonl', b'\xff\xfe', r'e.jsonl, row 0: is no jsonl: .*decode'),
        ('f.jsonl', b'5', r'f.jsonl, row 0: a row is an object .*is int, not dict'),
        ('g.parquet', b'PAR2', r'g.parquet, row 0: is no parquet'),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused_with_file_and_row(file, content, says, tmp_path):
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=says):
        load(f'polaris:{tmp_path}/{file}')


def test_files_that_are_missing_broken_or_of_another_kind_say_so(tmp_path):
    for name, says in (
        ('nothing:x', 'unknown kind'),
        (f'apps:{tmp_path}/none.jsonl', 'no such file'),
        (f'apps:{__file__}', 'unknown kind of file'),
    ):
        with pytest.raises(DataError, match=says):
            load(name)
    (tmp_path / 'broken.jsonl').write_text('{"a": 1}')
    with pytest.raises(DataError, match=r"broken.jsonl, row 0, .*'input_output' is missing"):
        load(f'apps:{tmp_path}/broken.jsonl')
    load.cache_clear()
    (tmp_path / 'broken.jsonl').write_text('{"b"')
    with pytest.raises(DataError, match=r'broken.jsonl, row 0: is no jsonl'):
        load(f'apps:{tmp_path}/broken.jsonl')


def test_rows_of_no_use_are_left_out_and_counted(tmp_path):
    called = {'input_output': json.dumps({'fn_name': 'f', 'inputs': [], 'outputs': []})}
    rows = [ROWS['apps'], ROWS['apps'] | called, ROWS['apps'] | called, ROWS['apps'] | {'input_output': ''}]
    _, manifest = load(stored(tmp_path, 'apps', rows))
    assert (manifest.kept, manifest.skipped) == (1, (('a function is called', 2), ('no tests', 1)))


def test_a_problem_that_comes_again_is_taken_once_and_a_folder_is_all_its_files(tmp_path):
    stored(tmp_path, 'polaris', [ROWS['polaris']] * 3)
    stored(tmp_path, 'more', [ROWS['polaris'] | {'problem': 'What is 2 + 2?', 'answer': '4'}], '.parquet')
    problems, manifest = load(f'polaris:{tmp_path}')
    assert [problem.answer for problem in problems] == ['4', '2']
    assert (manifest.file, manifest.rows, manifest.skipped) == ('more.parquet, polaris.jsonl', 4, (('repeated', 2),))


def test_a_hub_id_is_its_files_of_the_split_and_without_a_network_it_says_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r'cannot be had from the hub.*download it'):
        load('aime_2024')
    path = stored(tmp_path, 'polaris', [ROWS['polaris']]).removeprefix('polaris:')
    asked = []

    def download(repository: str, file: str, repo_type: str) -> str:
        asked.append((repository, file, repo_type))
        return path

    listed = ['README.md', 'a/test.jsonl', 'a/train-0.jsonl', 'a/train-1.jsonl', 'b/train-0.jsonl']
    monkeypatch.setattr(data.huggingface_hub, 'list_repo_files', lambda repository, repo_type: listed)
    monkeypatch.setattr(data.huggingface_hub, 'hf_hub_download', download)
    assert load('polaris:hub:me/set/a')[1].kept == 1
    assert load('polaris:hub:me/set/a/test.jsonl')[1].kept == 1
    files = ['a/train-0.jsonl', 'a/train-1.jsonl', 'a/test.jsonl']
    assert asked == [('me/set', file, 'dataset') for file in files]
    with pytest.raises(DataError, match=r'holds no .parquet or .jsonl'):
        load('polaris:hub:me/set/c')


class Evil:
    def __reduce__(self):
        return os.system, ('touch pwned',)


def test_a_pickle_that_would_call_something_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    packed = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    with pytest.raises(DataError, match='it would call'):
        load(stored(tmp_path, 'live_code_bench', [ROWS['live_code_bench'] | {'private_test_cases': packed}]))
    assert not (tmp_path / 'pwned').exists()


def test_a_training_problem_that_shares_a_run_of_words_with_a_test_is_found():
    long = 'Let a b c be three numbers such that their sum is five and their product is two. Find the sum of squares.'
    test = [MathProblem('t', long, '1'), MathProblem('s', 'What is 1 + 1?', '2')]
    train = [
        MathProblem('copy', long.upper().replace('.', ' !'), '1'),
        MathProblem('tail', f'Bob writes: {long} Then stop', '1'),
        MathProblem('short', 'what is 1+1', '2'),
        MathProblem('other', 'Let a b c be three numbers such that their sum is six. Find the product.', '1'),
    ]
    kept, shared = decontaminated(train, test)
    assert [problem.name for problem in kept] == ['other'] and shared == ('copy', 'tail', 'short')


def test_an_order_has_everything_once_an_epoch_and_needs_nothing_to_resume():
    order = Order(10, seed=3)
    epochs = [[order.at(10 * epoch + i) for i in range(10)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs) and epochs[0] != epochs[1]
    assert [Order(10, seed=3).at(i) for i in range(7, 13)] == epochs[0][7:] + epochs[1][:3]
    assert [Order(10, seed=4).at(i) for i in range(10)] != epochs[0]


def test_a_task_from_files_trains_on_what_no_split_holds_and_no_final_set_shares(tmp_path):
    train = [ROWS['polaris'] | {'problem': f'What is {i} plus {i * i}?', 'answer': str(i + i * i)} for i in range(900)]
    final = [ROWS['aime_2024'] | {'ID': str(i), 'Problem': f'What is {i} plus {i * i}?'} for i in range(5, 9)]
    task = MathTask(
        problems=stored(tmp_path, 'polaris', train), final=stored(tmp_path, 'aime_2024', final)
    )  # fmt: skip
    trained = {task.train(seed).problem.question for seed in range(3000)}
    held = {split: {task.test(split, i).problem.question for i in range(60)} for split in (HELD_OUT, STRICT)}
    finals = {task.test(split, i).problem.question for i in range(60) for split in (FINAL, FINAL_STRICT)}
    assert finals == {row['Problem'] for row in final}
    assert not trained & finals and not trained & held[HELD_OUT] and not held[HELD_OUT] & held[STRICT]
    assert len(trained) > 700 and task.train(12345) == task.train(12345)
    said = task.about()
    assert said[0].startswith('sandbox walls') and 'polaris: 900 of 900 rows of polaris.jsonl' in said[1]


def long(i: int) -> str:
    return ' '.join(f'word{i * k}' for k in range(3, 20))


def test_problems_of_a_file_come_once_an_epoch_in_an_order_of_the_run_that_needs_nothing_to_resume(tmp_path):
    rows = [ROWS['polaris'] | {'problem': long(i)} for i in range(300)]
    task = MathTask(problems=stored(tmp_path, 'polaris', rows))
    many = len(task.parts().training)
    at = lambda position, run=0: made(Seeded(task, 99, position, run)).problem.question  # noqa: E731
    epochs = [[at(many * epoch + i) for i in range(many)] for epoch in range(2)]
    assert len(set(epochs[0])) == many > 200 and set(epochs[0]) == set(epochs[1]) and epochs[0] != epochs[1]
    assert [at(i) for i in range(many - 3, many + 3)] == epochs[0][-3:] + epochs[1][:3]
    assert [at(i, run=1) for i in range(many)] != epochs[0]


def test_what_is_trained_on_shares_no_run_of_words_with_what_is_held_out_and_all_losses_are_counted(tmp_path):
    rows = [ROWS['polaris'] | {'problem': long(i)} for i in range(400)]
    alone = MathTask(problems=stored(tmp_path, 'polaris', rows))
    taken = [part[0].question for part in alone.parts().held_out]
    copies = [ROWS['polaris'] | {'problem': f'{many * "Well "}{text}'} for text in taken for many in range(1, 9)]
    task = MathTask(problems=stored(tmp_path, 'copied', rows + copies).replace('copied', 'polaris', 1))
    trained, lost = task.parts().training, dict(task.parts().left_out)
    held = {problem.question for part in task.parts().held_out for problem in part}
    assert not [p for p in trained if any(text in p.question for text in taken)] and set(taken) <= held
    assert len(trained) + len(held) + lost['shared with a held-out problem'] == 432
    assert lost['shared with a held-out problem'] >= 20 and lost['shared with a final set'] == 0
    assert "'shared with a held-out problem': " in task.about()[-1]


def test_a_strict_split_has_the_harder_problems_where_there_are_levels_and_says_so(tmp_path):
    rows = [ROWS['polaris'] | {'problem': long(i), 'difficulty': f'{i % 8}/8'} for i in range(900)]
    task = MathTask(problems=stored(tmp_path, 'polaris', rows))
    levels = {split: {p.level for p in task.read(split)} for split in (HELD_OUT, STRICT, FINAL, FINAL_STRICT)}
    assert min(levels[STRICT] | levels[FINAL_STRICT]) >= 6 > max(min(levels[HELD_OUT]), min(levels[FINAL]))
    assert 'strict splits: level 6 up' in task.about()[-1]
    assert all(MathTask().test(STRICT, i).problem.level >= 2 for i in range(20))
    flat = MathTask(
        problems=stored(tmp_path, 'flat', [row | {'difficulty': ''} for row in rows]).replace('flat', 'polaris', 1)
    )
    assert 'no harder' in flat.about()[-1] and len(flat.read(STRICT)) > 5


def test_each_problem_of_a_small_final_set_is_played_once(tmp_path):
    final = [ROWS['aime_2024'] | {'ID': str(i), 'Problem': long(i)} for i in range(30)]
    task = MathTask(final=stored(tmp_path, 'aime_2024', final))
    assert task.instances(FINAL) == task.instances(FINAL_STRICT) == 30 and task.instances(HELD_OUT) is None
    assert (
        available(task, FINAL, 120) == 30 and available(task, FINAL, 7) == 7 and available(task, HELD_OUT, 120) == 120
    )
    assert len({task.test(FINAL, i) for i in range(30)}) == 30


def test_a_tester_is_not_trained_on_tasks_without_a_golden_program(tmp_path):
    rows = [ROWS['apps'] | {'problem_id': i, 'question': f'Multiply by {i}.'} for i in range(400)]
    rows = [row | ({} if i % 2 else {'solutions': ''}) for i, row in enumerate(rows)]
    task = CodeTask(problems=stored(tmp_path, 'apps', rows))
    assert all(task.train(seed).problem.golden for seed in range(200))
    assert dict(task.parts().left_out)['no golden program'] == 200
    alone = dataclasses.replace(task, team=('coder',))
    assert not all(alone.train(seed).problem.golden for seed in range(200))

"""What every world owes its users, whichever game it is: values, any text, honest ends, no farmed rewards (A29)."""

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.own_task import CONFIG as OWN_TASK
from experiments.own_task import PairTask
from experiments.plan_path_at_grpo import CONFIG as PLAN_PATH
from experiments.sokoban_at_grpo import CONFIG as SOKOBAN
from experiments.sudoku_at_grpo import CONFIG as SUDOKU
from mallm.envs import plan_path, sandbox, sokoban, sudoku
from mallm.envs.arithmetic import ArithmeticTask
from mallm.envs.base import FINAL, FINAL_STRICT, HELD_OUT, STRICT, Task, World
from mallm.envs.plan_path_task import PlanPathTask
from mallm.envs.sokoban_task import SokobanTask
from mallm.envs.sudoku_task import SudokuTask
from mallm.envs.sudoku_team import fills_text
from mallm.rollout.chat import TinyTokenizer

SPLITS = (HELD_OUT, STRICT, FINAL, FINAL_STRICT)


@dataclasses.dataclass(frozen=True)
class Case:
    """A task and what this file has to know of its game.

    Attributes:
      task: the task.
      instance: what must never be both trained on and held out.
      position: what must not be worth coming back to.
      expert: (role, text) pairs that solve a world.
      tiny: whether the tiny tokenizer's alphabet is spoken.
      shared: the final splits share the watched ones' pool: few layouts, many boards.
    """

    task: Task
    instance: Callable[[Any], Any]
    position: Callable[[Any], Any]
    expert: Callable[[Any], list[tuple[str, str]]]
    tiny: bool = True
    shared: bool = False


def answer(moves: str, world: Any) -> str:
    return moves if world.speech.show.__module__.endswith('_team') else f'Let us go.\n#### {list(moves)}'


def solve_sokoban(world):
    moves = sokoban.solve(world.board)
    return [('plan', answer(moves[i : i + 8], world)) for i in range(0, len(moves), 8)]


def solve_path(world):
    maze, moves = world.maze, ''
    while not maze.solved:
        nearer = [(x, maze.move(x)) for x in 'UDLR' if maze.move(x)]
        letter, maze = min(nearer, key=lambda one: plan_path.distance(one[1]))
        moves += letter
    return [('plan', answer(moves[i : i + 8], world)) for i in range(0, len(moves), 8)]


def solve_sudoku(world):
    right = sudoku.solution(world.grid.size, world.grid.givens)
    fills = [(cell, right[cell]) for cell, value in enumerate(world.grid.cells) if not value]
    texts = [fills_text(tuple(fills[i : i + 4]), world.grid.size) for i in range(0, len(fills), 4)]
    return [('plan', text if answer('', world) == '' else f'#### {text}') for text in texts]


def path_case(**settings: Any) -> Case:
    return Case(PlanPathTask(**settings), lambda w: w.maze.layout_key(), lambda w: w.maze, solve_path)


def sokoban_case(**settings: Any) -> Case:
    return Case(SokobanTask(**settings), lambda w: w.board.layout_key(), lambda w: w.board, solve_sokoban, shared=True)


def sudoku_case(**settings: Any) -> Case:
    return Case(SudokuTask(**settings), lambda w: w.grid.puzzle_key(), lambda w: w.grid, solve_sudoku)


def in_words(case: Case) -> Case:
    return dataclasses.replace(case, task=dataclasses.replace(case.task, style='text'), tiny=False)


CASES = {
    'sokoban': sokoban_case(),
    'sokoban nearness': sokoban_case(reward='nearness'),
    'sokoban two boxes': sokoban_case(size=7, boxes=2, optimal=(2, 25), hard=(4, 25)),
    'sokoban solo': sokoban_case(team=('solo',)),
    'sokoban text': in_words(sokoban_case()),
    'plan path': path_case(),
    'plan path nearness': path_case(reward='nearness'),
    'plan path outcome': path_case(reward='outcome', size=6),
    'plan path alone': path_case(team=('plan',)),
    'plan path solo': path_case(team=('solo',)),
    'plan path text': in_words(path_case()),
    'sudoku 4': sudoku_case(),
    'sudoku 4 consistency': sudoku_case(reward='consistency'),
    'sudoku 4 outcome': sudoku_case(reward='outcome'),
    'sudoku 4 alone': sudoku_case(team=('plan',)),
    'sudoku 4 solo': sudoku_case(team=('solo',)),
    'sudoku 6': sudoku_case(size=6, blanks=(14, 18)),
    'sudoku 9': sudoku_case(size=9, blanks=(30, 36)),
    'sudoku 9 text': in_words(sudoku_case(size=9, blanks=(30, 36))),
    'arithmetic': Case(
        ArithmeticTask(), lambda w: (w.calculation, w.story.split()[2]), lambda w: w.answered,
        lambda w: [('tool', w.calculation), ('plan', str(w.target))], tiny=False,
    ),
    'own task': Case(
        PairTask(('first', 'second')), lambda w: (w.total, w.banned), lambda w: w.digits,
        lambda w: list(zip(('first', 'second'), w.right()[0], strict=True)),
    ),
}  # fmt: skip

every_case = pytest.mark.parametrize('name', CASES)


@functools.cache
def start(name: str, seed: int) -> Any:
    return CASES[name].task.train(seed)


TEXTS = st.one_of(
    st.text(alphabet='UDLR0123456789*', max_size=12),
    st.text(max_size=40),
    st.sampled_from([
        '', '[]', 'push up', ' u ', 'UP, LEFT', '["R", 3]', 'R' * 10_000, '1' * 10_000, 'R\uff0cL', '\U0001f600',
        '#### ["R", "U"]', '#### [[0, 0, 1], [1, 1, 2]]', '####', '#### [' * 500, '[' * 3000, 'R' + '9' * 20, 'nan',
        '\u0663\u0664\u0661', '\x00', '**Actions List**: [9]', '<think>U</think>', '\n' * 100, '#### [[9, 9, 9]]',
    ]),
)  # fmt: skip


@every_case
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_no_text_raises_and_acting_leaves_the_world_it_acted_on_alone(name, data):
    at = start(name, data.draw(st.integers(0, 5)))
    for _ in range(data.draw(st.integers(1, 4))):
        role, text = data.draw(st.sampled_from(at.order)), data.draw(TEXTS)
        before, told = hash(at), [at.observe(one) for one in at.order]
        after, reward = at.act(role, text)
        assert (after, reward) == at.act(role, text) and hash(after) == hash(at.act(role, text)[0])
        assert hash(at) == before and [at.observe(one) for one in at.order] == told
        assert reward.is_finite() and reward.local <= 0
        assert reward.team == pytest.approx(sum(v for n, v in reward.terms if n in ('solved', 'shaping', 'good')))
        assert isinstance(after.render(), str)
        at = after


@every_case
def test_a_world_is_a_frozen_value_made_from_its_seed_alone(name):
    task, world = CASES[name].task, start(name, 3)
    assert isinstance(world, World) and world == task.train(3) and world.order == task.team
    assert not world.solved and not world.over
    with pytest.raises(dataclasses.FrozenInstanceError):
        world.order = ()
    for split in SPLITS:
        assert task.test(split, 2) == task.test(split, 2) != start(name, 2)
    assert task.floor(world, 3, 5) == task.floor(world, 3, 5) and isinstance(task.difficulty(world), int)


@every_case
def test_what_is_held_out_is_never_trained_on_and_the_splits_differ(name):
    case, many = CASES[name], 8 if any(slow in name for slow in ('sudoku 9', 'sudoku 6', 'two boxes')) else 40
    trained = {case.instance(start(name, seed)) for seed in range(2 * many)}
    tested = {split: {case.instance(case.task.test(split, i)) for i in range(many // 2)} for split in SPLITS}
    watched, final = tested[HELD_OUT] | tested[STRICT], tested[FINAL] | tested[FINAL_STRICT]
    assert not trained & (watched | final)
    assert len(trained) > many
    assert case.shared or not watched & final
    assert len({tuple(case.task.test(split, i) for i in range(3)) for split in SPLITS}) == 4


@every_case
def test_an_expert_solves_held_out_instances_and_is_paid_more_than_for_anything_else(name):
    case = CASES[name]
    for index in range(3):
        at = case.task.test(HELD_OUT, index)
        earned = 0.0
        for role, text in case.expert(at):
            assert not at.solved and not at.over
            at, reward = at.act(role, text)
            assert reward.local == 0 and reward.team >= 0
            earned += reward.team
        assert at.solved and at.over and earned >= 1
        for role in at.order:
            assert at.act(role, 'R')[1].team == 0  # nothing more is to be had


@every_case
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_coming_back_never_pays_nor_does_writing_nothing_of_use(name, data):
    case = CASES[name]
    at = start(name, data.draw(st.integers(0, 5)))
    role, seen, earned = at.order[-1], {}, 0.0
    text = st.one_of(st.text(alphabet='UDLR', max_size=5), st.text(alphabet='0123', max_size=9), TEXTS)
    for one in data.draw(st.lists(text, max_size=10)):
        seen.setdefault(case.position(at), earned)
        if at.over:
            break
        at, reward = at.act(role, answer(one, at) if 'text' in name else one)
        earned += reward.total(1.0)
        assert earned <= seen.get(case.position(at), earned) + 1e-9


@every_case
def test_a_turn_that_changes_nothing_costs_something(name):
    case, at = CASES[name], start(name, 1)
    for text in ('QS?T', '\U0001f600', '-', '', '[]', ' '):
        for role in at.order:
            after, reward = at.act(role, text)
            assert reward.total(1.0) < 0 and reward.team == 0
            assert case.position(after) == case.position(at) or case.task.team[0] != 'tool'


@every_case
def test_random_play_is_called_solved_only_when_it_is(name):
    """The verdict is held against rules written out here, not against the world's own."""
    draw = random.Random(7)
    for seed in range(3):
        at = start(name, seed)
        for _ in range(6):
            if at.over:
                break
            text = ''.join(draw.choice('UDLR0123') for _ in range(6))
            at, _ = at.act(at.order[-1], answer(text, at) if 'text' in name else text)
        assert at.solved == really_solved(at)
    solved = CASES[name].task.train(11)
    for role, text in CASES[name].expert(solved):
        assert not really_solved(solved)
        solved, _ = solved.act(role, text)
    assert really_solved(solved)


def really_solved(world: Any) -> bool:
    rows = world.render().split('\n')
    if isinstance(CASES['arithmetic'].task.train(0), type(world)):
        return world.answered is not None and world.answered == eval(world.calculation)
    if 'grid' in vars(world):
        size, (high, wide) = world.grid.size, sudoku.SHAPES[world.grid.size]
        values = [[int(v) for v in row.replace('.', '0')] for row in rows]
        boxes = [
            [values[top + i][left + j] for i in range(high) for j in range(wide)]
            for top in range(0, size, high)
            for left in range(0, size, wide)
        ]
        flat = [value for row in values for value in row]
        kept = all(given in (0, value) for given, value in zip(world.grid.givens, flat, strict=True))
        whole = [*values, *map(list, zip(*values, strict=True)), *boxes]
        return kept and all(sorted(unit) == list(range(1, size + 1)) for unit in whole)
    if 'maze' in vars(world):
        return '+' in ''.join(rows) and '.' not in ''.join(rows)
    if 'board' in vars(world):
        return '$' not in ''.join(rows)
    a, b = (*world.digits, '?', '?')[:2]
    return a.isdigit() and b.isdigit() and int(a) + int(b) == world.total and world.banned not in world.digits


@every_case
def test_demonstrations_can_be_said_and_are_what_roles_write(name):
    case, limit = CASES[name], 13
    found = [shown for seed in range(6) for shown in case.task.demonstrations(seed)]
    assert {shown.role for shown in found} <= set(case.task.team)
    if case.tiny:
        tokenizer = TinyTokenizer(case.task.signs)
        assert found
        for shown in found:
            assert tokenizer.chat(shown.messages) and len(tokenizer.encode(shown.text)) < limit
    if 'text' in name:
        assert not found  # a pretrained model needs none


@every_case
def test_whatever_is_written_can_be_shown_to_the_tiny_policy(name):
    case, draw = CASES[name], random.Random(3)
    tokenizer = TinyTokenizer(case.task.signs)
    if not case.tiny:
        authors = [message.author for message in start(name, 0).observe(case.task.team[0])]
        assert (authors[0], authors[-1]) == ('system', 'user')
        return
    at = start(name, 4)
    for _ in range(12):
        for role in at.order:
            ids = tokenizer.chat(at.observe(role))
            assert len(ids) < 260
            at, _ = at.act(role, ''.join(draw.choice(tokenizer.alphabet) for _ in range(draw.randint(0, 12))))
        if at.over:
            at = start(name, 5)


@pytest.mark.parametrize('config', [PLAN_PATH, SUDOKU, OWN_TASK, SOKOBAN], ids=lambda config: config.name)
def test_what_a_beginner_writes_fits_into_the_tokens_of_the_experiment(config):
    limits = config.sampler().roles
    shown = [one for seed in range(40) for one in config.task.demonstrations(seed)]
    assert {one.role for one in shown} <= set(limits)
    assert all(len(one.text) <= limits[one.role].max_tokens for one in shown)


FOLD_OF = {
    'plan path': lambda w: plan_path.layout_fold(w.maze),
    'sudoku 4': lambda w: sudoku.puzzle_fold(w.grid),
    'own task': lambda w: (w.total + int(w.banned)) % 5,
}


@pytest.mark.parametrize('name', FOLD_OF)
def test_the_watched_and_the_final_instances_have_a_fold_of_their_own_each(name):
    """A fold is a function of the instance, so that no two splits of different folds can ever share one."""
    task, fold = CASES[name].task, FOLD_OF[name]
    folds = {split: {fold(task.test(split, i)) for i in range(12)} for split in SPLITS}
    assert folds == {HELD_OUT: {0}, STRICT: {0}, FINAL: {1}, FINAL_STRICT: {1}}
    assert not {fold(task.train(seed)) for seed in range(60)} & {0, 1}


@pytest.mark.parametrize('name', ['sokoban text', 'plan path text', 'sudoku 9 text'])
def test_chance_may_move_as_often_as_the_team_may(name, monkeypatch):
    """Every draw of the floor, counted: as many as the text style's rules allow in two turns, not the tiny policy's."""
    task, drawn = CASES[name].task, []
    unsolved = 'UDLR'[0]  # up, up, up: solves nothing here

    class Counted(random.Random):
        def choice(self, some):
            drawn.append(1)
            return unsolved if unsolved in some else super().choice(some)

    monkeypatch.setattr(random, 'Random', Counted)
    world = start(name, 1)
    drawn.clear()
    assert not task.floor(world, 2, 0)
    assert len(drawn) == 2 * (task.rules.fills if 'sudoku' in name else task.rules.moves)


@pytest.mark.parametrize('name', ['sokoban text', 'plan path text', 'sudoku 9 text'])
def test_programs_are_refused_where_isolation_is_asked_for_and_a_wall_is_missing(name, monkeypatch):
    weak = sandbox.Sandbox(workers=1, strong=False)
    monkeypatch.setattr(sandbox, 'shared', lambda: weak)
    task = dataclasses.replace(CASES[name].task, require_isolation=True)
    world = task.train(1)
    assert world == task.train(1) != start(name, 1)
    with pytest.raises(sandbox.SandboxError, match='require-isolation'):
        task.about()
    with pytest.raises(sandbox.SandboxError, match='require-isolation'):
        world.act('tool', '```python\nprint(1)\n```')
    assert dataclasses.replace(task, style='compact').about() == ()  # no program is run there
    weak.close()

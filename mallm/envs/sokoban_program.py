"""What a model may write: lists of moves, and push programs with their interpreter. Nothing here raises on any text."""

import dataclasses
import re
from typing import NamedTuple

from mallm.envs.prose import ANSWER
from mallm.envs.sokoban_board import Board, cells_of, push_stand, steps, walk

PUSH_CAP = 64
"""A program does at most this many pushes; the rest is dropped and `truncated` says so."""

_WORDS = {'up': 'U', 'down': 'D', 'left': 'L', 'right': 'R'}
_TOKEN = re.compile(
    r'(?P<silent>[\s,;:\uff0c\uff1b\uff1a\u3001\[\](){}"\'`]+)|(?P<word>[A-Za-z]+)|#(?P<box>[0-9]+)|(?P<number>[0-9]+)|.',
    re.DOTALL,
)


class Push(NamedTuple):
    """One push. `box` is n for the n-th box in reading order (from 1) as this push starts, None for the box last used.

    `letter` is one of MOVES.
    """

    box: int | None
    letter: str


@dataclasses.dataclass(frozen=True)
class Program:
    """A parsed push program; `garbage` counts the characters that were not understood."""

    pushes: tuple[Push, ...]
    garbage: int
    truncated: bool


@dataclasses.dataclass(frozen=True)
class ParsedMoves:
    """Parsed moves as letters of MOVES; `garbage` counts the characters before the cap that were not understood."""

    letters: str
    garbage: int
    truncated: bool


@dataclasses.dataclass(frozen=True)
class Execution:
    """What a program did.

    Attributes:
      moves: all moves made, walks and pushes, as letters of MOVES.
      board: the board after them.
      stuck: '' or the letter of the first push that could not be done; nothing after it was tried.
      pushes: how many pushes were done.
    """

    moves: str
    board: Board
    stuck: str
    pushes: int


def parse_moves(text: str, cap: int) -> ParsedMoves:
    """Reads letters u d l r and the words up, down, left, right in any case; keeps the first `cap` of them.

    Space, commas, semicolons, colons, quotes and brackets are silent. All else is garbage and skipped, numbers too:
    `["R", 3]` says R with one character of garbage. If a line starts with `####`, only the last such line is read.
    """
    letters: list[str] = []
    garbage = 0
    for token in _TOKEN.finditer(_answer(text)):
        said = _said(token['word'])
        garbage += len(token[0]) if not said and not token['silent'] else 0
        letters.extend(said)
        if len(letters) > cap:
            return ParsedMoves(''.join(letters[:cap]), garbage, True)
    return ParsedMoves(''.join(letters), garbage, False)


def parse_program(text: str) -> Program:
    """Reads a push program such as `R2 U1`, `RRU`, `["R", 2]`, `right 2, up` or `#2:R2 #1:U`.

    A number repeats the letter before it (R0 is nothing); `#n` says that the next push takes the n-th box in reading
    order. Silent characters and `####` lines are as in parse_moves.
    """
    pushes: list[Push] = []
    garbage, box, repeatable = 0, None, False
    for token in _TOKEN.finditer(_answer(text)):
        if token['silent']:
            continue
        said = _said(token['word'])
        if said:
            for letter in said:
                pushes.append(Push(box, letter))
                box = None
        elif token['box']:
            box = _small(token['box'])
        elif token['number'] and repeatable:
            last, count = pushes.pop(), _small(token['number'])
            box = last.box if not count else None
            pushes.extend((last, *[Push(None, last.letter)] * (count - 1)) if count else ())
        else:
            garbage += len(token[0])
        repeatable = bool(said)
        if len(pushes) > PUSH_CAP:
            return Program(tuple(pushes[:PUSH_CAP]), garbage, True)
    return Program(tuple(pushes), garbage, False)


def execute(board: Board, pushes: tuple[Push, ...]) -> Execution:
    """Does the pushes in order, walking to the right side of the box by a shortest way before each.

    Ends at the first push that cannot be done (no such box, a wall or box behind, no way there; the player then stays
    where it was) or when the board is solved.
    """
    moves: list[str] = []
    boxes = tuple(cells_of(board.boxes))
    used = boxes[0] if boxes else -1
    for done, push in enumerate(pushes):
        if board.solved:
            return Execution(''.join(moves), board, '', done)
        box = used if push.box is None else _nth_box(board, push.box)
        stand = push_stand(board, box, push.letter) if box >= 0 else None
        way = None if stand is None else walk(board, stand)
        if way is None:
            return Execution(''.join(moves), board, push.letter, done)
        used = steps(board.width, board.height)[push.letter][box]
        board = dataclasses.replace(board, boxes=board.boxes ^ (1 << box | 1 << used), player=box)
        moves += (way, push.letter)
    return Execution(''.join(moves), board, '', len(pushes))


def _nth_box(board: Board, number: int) -> int:
    boxes = tuple(cells_of(board.boxes))
    return boxes[number - 1] if 1 <= number <= len(boxes) else -1


def _answer(text: str) -> str:
    """What follows the last `####` that starts a line and has something after it (a row of walls has not)."""
    found = ANSWER.findall(text)
    return found[-1] if found else text


def _said(word: str | None) -> str:
    if word is None:
        return ''
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    letters = word.upper()
    return letters if not letters.strip('UDLR') else ''


def _small(digits: str) -> int:
    """The number, or PUSH_CAP + 1 when it is larger; int() itself refuses texts of thousands of digits."""
    digits = digits.lstrip('0')
    return min(int(digits[:4] or '0'), PUSH_CAP + 1)

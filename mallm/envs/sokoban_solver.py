"""Exact distances: one backward search per layout for small state spaces, A* with a matching bound for the others."""

import array
import dataclasses
import functools
import heapq
import itertools
import math

from mallm.envs.sokoban_board import BACK, MOVES, Board, cells_of, flood, neighbours, steps

TABLE_STATES = 20_000
"""Boards with several boxes and at most this many states get a whole table (tens of milliseconds), others A*."""

_MATCHED_BOXES = 8  # the matching costs 2**boxes; with more boxes each takes its nearest goal


_UNDECIDED = '?'


class SolverLimit(RuntimeError):
    """A board that A* could neither solve nor refute within its limit of expanded states."""


def distance(board: Board, limit: int = 200_000) -> int | None:
    """The fewest moves that solve the board, None when nothing does.

    One box is a look-up in a cached table, whatever `limit` is. Raises SolverLimit when a board with many boxes
    needs more than `limit` expanded states.
    """
    boxes = board.boxes
    if boxes & (boxes - 1):
        return _distance_many(board, limit)
    row = _table(board.width, board.height, board.walls, board.goals, 1).get(boxes)
    if row is None:
        return None if boxes else 0
    moves = row[board.player]
    return moves if moves >= 0 else None


def solve(board: Board, limit: int = 200_000) -> str | None:
    """One solution with the fewest moves as letters of MOVES, '' when solved, None when unsolvable.

    Raises SolverLimit as `distance` does.
    """
    board = _without_decoration(board)
    if not _has_table(board):
        return _searched(board, limit)
    left = distance(board)
    if left is None:
        return None
    letters = []
    while left:
        for letter in MOVES:
            after = board.move(letter)
            if after is not None and distance(after) == left - 1:
                board, left = after, left - 1
                letters.append(letter)
                break
    return ''.join(letters)


def _distance_many(board: Board, limit: int) -> int | None:
    board = _without_decoration(board)
    count = board.boxes.bit_count()
    if count < 2:
        return distance(board)
    if not _has_table(board):
        path = _searched(board, limit)
        return None if path is None else len(path)
    row = _table(board.width, board.height, board.walls, board.goals, count).get(board.boxes)
    return None if row is None or row[board.player] < 0 else row[board.player]


def _without_decoration(board: Board) -> Board:
    """The same game without boxes that stand on goals out of the player's reach for ever: those become walls."""
    if not board.boxes & board.goals or not board.boxes & (board.boxes - 1):
        return board
    area = flood(board.width, board.height, board.walls, board.player)
    idle = board.boxes & board.goals & ~area
    if not idle:
        return board
    return dataclasses.replace(board, walls=board.walls | idle, goals=board.goals & ~idle, boxes=board.boxes & ~idle)


def _has_table(board: Board) -> bool:
    count = board.boxes.bit_count()
    free = board.width * board.height - board.walls.bit_count()
    return count <= 1 or free * math.comb(free, count) <= TABLE_STATES


@functools.lru_cache(maxsize=2048)
def _table(width: int, height: int, walls: int, goals: int, count: int) -> dict[int, array.array]:
    """Moves to solve every state with `count` boxes: set of boxes -> one number a player cell, -1 for unsolvable.

    A breadth-first search backwards from all solved states; undoing a move is a step back that may pull a box along.
    """
    free = tuple(cells_of(~walls & (1 << width * height) - 1))
    ways = _undone_steps(width, height)
    back = {cell: [way for way in ways[cell] if not walls & way[1]] for cell in free}
    kind = 'h' if len(free) * math.comb(len(free), count) < 1 << 15 else 'i'  # no distance exceeds the states
    unknown = array.array(kind, [-1]) * (width * height)
    rows: dict[int, array.array] = {}
    frontier: list[tuple[int, int]] = []
    for placed in itertools.combinations(cells_of(goals & ~walls), count):
        boxes = sum([1 << cell for cell in placed])
        row = rows[boxes] = unknown[:]
        for cell in free:
            if not boxes >> cell & 1:
                row[cell] = 0
                frontier.append((cell, boxes))
    moves = 0
    while frontier:
        moves += 1
        found: list[tuple[int, int]] = []
        for cell, boxes in frontier:
            row = rows[boxes]
            for before, before_bit, ahead_bit, moved in back[cell]:
                if boxes & before_bit:
                    continue
                if row[before] < 0:
                    row[before] = moves
                    found.append((before, boxes))
                if boxes & ahead_bit:
                    pulled = boxes ^ moved
                    other = rows.get(pulled)
                    if other is None:
                        other = rows[pulled] = unknown[:]
                    if other[before] < 0:
                        other[before] = moves
                        found.append((before, pulled))
        frontier = found
    return rows


@functools.lru_cache(maxsize=256)
def _undone_steps(width: int, height: int) -> tuple[tuple[tuple[int, int, int, int], ...], ...]:
    """For each cell the ways to have come to it: (cell before, its bit, bit of the cell ahead, bits a push changes)."""
    table = steps(width, height)
    result = []
    for cell, pairs in enumerate(neighbours(width, height)):
        ways = []
        for letter, before in pairs:
            ahead = table[BACK[letter]][cell]
            ahead_bit = 1 << ahead if ahead >= 0 else 0
            ways.append((before, 1 << before, ahead_bit, 1 << cell | ahead_bit))
        result.append(tuple(ways))
    return tuple(result)


@functools.lru_cache(maxsize=1024)
def _push_distances(width: int, height: int, walls: int, goal: int) -> dict[int, int]:
    """Fewest pushes from each cell to `goal` for a box alone on the board, wherever the player is."""
    table = steps(width, height)
    found, queue = {goal: 0}, [goal]
    for cell in queue:
        for letter in MOVES:
            box = table[letter][cell]
            stand = table[letter][box] if box >= 0 else -1
            if stand >= 0 and not (walls >> box | walls >> stand) & 1 and box not in found:
                found[box] = found[cell] + 1
                queue.append(box)
    return found


def _bound(boxes: int, pushes: tuple[dict[int, int], ...]) -> float:
    """A lower bound on the pushes left: the cheapest way to give each box its own goal; inf when there is none."""
    cells = tuple(cells_of(boxes))
    if len(pushes) > _MATCHED_BOXES:
        return sum(min(goal.get(cell, math.inf) for goal in pushes) for cell in cells)
    best = {0: 0}
    for cell in cells:
        after: dict[int, int] = {}
        for used, cost in best.items():
            for index, goal in enumerate(pushes):
                if not used >> index & 1 and cell in goal:
                    key, total = used | 1 << index, cost + goal[cell]
                    if total < after.get(key, math.inf):
                        after[key] = total
        best = after
    return min(best.values(), default=math.inf)


def _searched(board: Board, limit: int) -> str | None:
    path = _search(board, limit)
    if path == _UNDECIDED:
        raise SolverLimit(
            f'board {board.width}x{board.height} with {board.boxes.bit_count()} boxes is not solved or refuted '
            f'within limit={limit} expanded states: raise limit, or use smaller boards or fewer boxes'
        )
    return path


@functools.lru_cache(maxsize=8192)
def _search(start: Board, limit: int) -> str | None:
    """A* over single moves. The bound never drops by more than one a move, so a state is expanded at most once.

    _UNDECIDED where the limit ends it: an exception would not be cached, and the search be made again.
    """
    pushes = tuple(_push_distances(start.width, start.height, start.walls, goal) for goal in cells_of(start.goals))
    bounds = {start.boxes: _bound(start.boxes, pushes)}
    if bounds[start.boxes] == math.inf:
        return None
    came: dict[Board, tuple[Board, str] | None] = {start: None}
    cost = {start: 0}
    order = itertools.count()
    heap = [(bounds[start.boxes], bounds[start.boxes], 0, start)]
    closed: set[Board] = set()
    while heap:
        _, _, _, board = heapq.heappop(heap)
        if board in closed:
            continue
        if board.solved:
            return _letters(board, came)
        closed.add(board)
        if len(closed) > limit:
            return _UNDECIDED
        moves = cost[board] + 1
        for letter in MOVES:
            after = board.move(letter)
            if after is None or moves >= cost.get(after, math.inf):
                continue
            if after.boxes not in bounds:
                bounds[after.boxes] = _bound(after.boxes, pushes)
            bound = bounds[after.boxes]
            if bound < math.inf:
                cost[after], came[after] = moves, (board, letter)
                heapq.heappush(heap, (moves + bound, bound, next(order), after))
    return None


def _letters(board: Board, came: dict[Board, tuple[Board, str] | None]) -> str:
    letters = []
    while (step := came[board]) is not None:
        board, letter = step
        letters.append(letter)
    return ''.join(reversed(letters))

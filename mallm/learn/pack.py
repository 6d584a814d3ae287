"""The host/device border, crossed once: credited groups become padded arrays of a few fixed shapes.

A group keeps its structure: its prompt stands once beside its K answers. A plain row is a group with K = 1.
"""

import dataclasses
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from mallm.types import Answer, Credited, Prompt


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """One micro-batch of G groups.

    Attributes:
      prompts_GP: token ids, padded on the right.
      lengths_G: true prompt lengths.
      answers_GKS: token ids, padded on the right.
      mask_GKS: 1 at tokens that are trained on (the end token included), else 0.
      sampler_logps_GKS: log-probabilities as the sampler reported them, nats.
      old_logps_GKS: the same under the policy that ratios are taken against; the sampler's own unless rescored.
      advantages_GK: one number an answer.
      temperatures_GK: what each answer was sampled at.
      divisor: the summed loss is divided by this; shared by all micro-batches of one optimiser step.
    """

    prompts_GP: jax.Array | np.ndarray
    lengths_G: jax.Array | np.ndarray
    answers_GKS: jax.Array | np.ndarray
    mask_GKS: jax.Array | np.ndarray
    sampler_logps_GKS: jax.Array | np.ndarray
    old_logps_GKS: jax.Array | np.ndarray
    advantages_GK: jax.Array | np.ndarray
    temperatures_GK: jax.Array | np.ndarray
    divisor: jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class Row:
    """One group on its way into a batch: a prompt, its answers, an advantage for each, and what they were sampled at.

    `temperatures` holds one number for each answer, or one for all. An answer left out of the loss is empty.
    """

    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    logps: tuple[tuple[float, ...], ...]
    advantages: tuple[float, ...]
    temperatures: tuple[float, ...] = (1.0,)

    @property
    def tokens(self) -> int:
        return sum(len(answer) for answer in self.answers)

    @property
    def trained(self) -> int:
        """Answers that are trained on."""
        return sum(map(bool, self.answers))


Shape = tuple[int, int, int]
"""(K, P, S) of a batch: answers to a prompt, padded length of prompts, padded length of answers."""

Divisor = Callable[[Sequence[Row]], float]


def token_count(rows: Sequence[Row]) -> float:
    """Token mean: every trained token of the optimiser step weighs the same."""
    return float(max(1, sum(row.tokens for row in rows)))


def constant(tokens_an_answer: int) -> Divisor:
    """Constant normalisation: long answers weigh more, and the scale never depends on sampled lengths.

    Source: Dr. GRPO, arXiv 2503.20783.
    """

    def divisor(rows: Sequence[Row]) -> float:
        return float(max(1, tokens_an_answer * sum(row.trained for row in rows)))

    return divisor


@dataclasses.dataclass(frozen=True)
class Packing:
    """How rows are cut into optimiser steps and micro-batches.

    Attributes:
      step_groups: groups in one optimiser step; 0 puts everything into one step.
      micro_groups: groups in one micro-batch, the only G that is ever compiled.
      multiple: prompt and answer lengths are padded up to a multiple of these.
      divisor: what the summed loss is divided by.
    """

    step_groups: int
    micro_groups: int
    multiple: tuple[int, int] = (16, 8)
    divisor: Divisor = token_count

    def __post_init__(self) -> None:
        if self.micro_groups < 1:
            raise ValueError(f'micro_groups={self.micro_groups}: a micro-batch holds at least one group')
        if self.step_groups % self.micro_groups:
            raise ValueError(
                f'step_groups={self.step_groups}, micro_groups={self.micro_groups}: a step is a whole number of '
                'micro-batches; make step_groups a multiple (0 for one step)'
            )


Keep = Callable[[Answer], bool]


def every_answer(answer: Answer) -> bool:
    """All that was sampled is trained on."""
    return True


def finished_answers(answer: Answer) -> bool:
    """Answers cut by the length limit are left out of the loss and of its divisor.

    They stay in what their group is compared with, and in all logged rewards and lengths. Source: overlong filtering,
    DAPO, arXiv 2503.14476.
    """
    return answer.finish != 'length'


def rows_of(
    credited: Sequence[Credited], temperatures: Mapping[str, tuple[float, ...]], keep: Keep = every_answer
) -> list[Row]:
    """Rows of trained groups. A row holds exactly the ids that were sampled; nothing is tokenised again."""
    rows = [
        Row(
            item.group.prompt.ids,
            tuple(c.answer.ids if keep(c.answer) else () for c in item.group.candidates),
            tuple(c.answer.logps if keep(c.answer) else () for c in item.group.candidates),
            item.advantages,
            temperatures[item.group.key.role],
        )
        for item in credited
    ]
    return [row for row in rows if row.trained]


def demonstration(prompt: Prompt, answer: Sequence[int]) -> Row:
    """A supervised example: one answer with advantage 1."""
    return Row(prompt.ids, (tuple(answer),), ((0.0,) * len(answer),), (1.0,))


def pack(rows: Sequence[Row], packing: Packing, seed: int) -> list[list[Batch]]:
    """Optimiser steps, each a list of micro-batches whose gradients are added up.

    Rows are shuffled (seeded), gathered by padded shape so that few shapes are compiled, and cut into micro-batches;
    each optimiser step then takes whole micro-batches. What is left over of a shape is filled up with padding groups,
    which have no trained token, or goes with what is left over of another (see `joined`).
    """
    draw = random.Random(seed)
    by_shape: dict[Shape, list[Row]] = defaultdict(list)
    for row in draw.sample(list(rows), len(rows)):
        by_shape[shape_of(row, packing)].append(row)
    size = packing.micro_groups
    whole = {shape: len(members) // size * size for shape, members in by_shape.items()}
    micros = [
        (shape, by_shape[shape][start : start + size])
        for shape in sorted(by_shape)
        for start in range(0, whole[shape], size)
    ]
    micros += joined({shape: left for shape in by_shape if (left := by_shape[shape][whole[shape] :])}, size).items()
    draw.shuffle(micros)
    per_step = packing.step_groups // size or max(1, len(micros))
    steps = []
    for start in range(0, len(micros), per_step):
        step = micros[start : start + per_step]
        divisor = packing.divisor([row for _, members in step for row in members])
        steps.append([batch_of(members, shape, size, divisor) for shape, members in step])
    return steps


def joined(left: Mapping[Shape, list[Row]], size: int) -> dict[Shape, list[Row]]:
    """Less than a micro-batch of each shape; where two fit into one, the smaller shape's rows are padded to the larger.

    A micro-batch costs the same whether its groups are real or padding, so one less is worth that.
    """
    kept = {shape: list(left[shape]) for shape in sorted(left)}
    for shape in tuple(kept):
        larger = [
            other
            for other, rows in kept.items()
            if other != shape and holds(other, shape) and len(rows) + len(kept[shape]) <= size
        ]
        if larger:
            kept[larger[0]] += kept.pop(shape)
    return kept


def holds(larger: Shape, smaller: Shape) -> bool:
    """Whether rows of one shape can be padded to another: as many answers, none of them too long."""
    return larger[0] == smaller[0] and larger[1] >= smaller[1] and larger[2] >= smaller[2]


def shape_of(row: Row, packing: Packing) -> Shape:
    """The smallest shape that a row fits into."""
    longest = max(len(answer) for answer in row.answers)
    prompt_multiple, answer_multiple = packing.multiple
    return len(row.answers), round_up(len(row.prompt), prompt_multiple), round_up(longest, answer_multiple)


def round_up(length: int, multiple: int) -> int:
    return -(-max(1, length) // multiple) * multiple


def batch_of(rows: Sequence[Row], shape: Shape, size: int, divisor: float) -> Batch:
    """Pads rows of one shape into a micro-batch of `size` groups."""
    K, P, S = shape
    prompts, lengths = np.zeros((size, P), np.int32), np.ones(size, np.int32)
    answers, mask = np.zeros((size, K, S), np.int32), np.zeros((size, K, S), np.float32)
    logps, advantages = np.zeros((size, K, S), np.float32), np.zeros((size, K), np.float32)
    temperatures = np.ones((size, K), np.float32)
    for g, row in enumerate(rows):
        prompts[g, : len(row.prompt)], lengths[g], temperatures[g] = row.prompt, len(row.prompt), row.temperatures
        advantages[g] = row.advantages
        for k, (ids, logp) in enumerate(zip(row.answers, row.logps, strict=True)):
            answers[g, k, : len(ids)], logps[g, k, : len(ids)], mask[g, k, : len(ids)] = ids, logp, 1
    return Batch(prompts, lengths, answers, mask, logps, logps, advantages, temperatures, np.float32(divisor))

"""Lengths at which each decision of a mask and a score goes both ways, for constants of any
size.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kgen.expr.nodes import Node, reads, variables
from kgen.kernels.attention.spec import ANY
from kgen.kernels.attention.verify.problem import Problem
from kgen.verify.deciding import decided, decisions
from kgen.verify.evaluate import evaluate
from kgen.verify.tensors import DTYPES

SHORT = 24
"""Short side of a case: more positions than masks usually show to all queries."""
NEAR = 130
"""Number of queries and keys of plain cases. Equal numbers give whole tiles, also behind a
window.
"""
FAR, FAR_TIED = 256 * NEAR, 16 * NEAR
"""Greatest length of a search, with and without a short side."""
STEP = 32
"""Precision of the smallest deciding length."""
MARGIN = 173
"""Positions after the smallest deciding length: more than a tile, and not a multiple of one, so
tiles are skipped.
"""


@cache
def shapes_that_decide(problem: Problem) -> tuple[tuple[int, int], ...]:
    """Return the smallest (queries, keys) at which positions decide the nodes that plain cases
    leave undecided.

    Decisions of buffers, run-time parameters and scores depend on their values, and are not
    searched.
    """
    found: dict[tuple[int, int], None] = {}
    for node in (n for tree in problem.trees for n in decisions(tree) if _of_positions(problem, n)):
        taken = set().union(*(_taken(problem, node, *shape) for shape in ((NEAR, NEAR), *found)))
        for way in {0, 1} - taken:
            if way not in taken and (shape := _smallest(problem, node, way)):
                taken |= _taken(problem, node, *shape)
                found[shape] = None
    for sq, sk in tuple(found):
        if problem.decodes and not problem.tied_lengths and sq <= SHORT:
            found[NEAR // 2 + 3, sk + NEAR // 2] = None  # few queries use the decoding kernels
    return tuple(found)


def _of_positions(problem: Problem, node: Node) -> bool:
    names, fixed = variables(node), {p.name for p in problem.params if not p.runtime}
    return bool(names & {"q_idx", "kv_idx"}) and not reads(node) and names <= _NAMES | fixed


_NAMES = {"q_idx", "kv_idx", "b", "h", "B", "HQ", "HKV", "SQ", "SK", "inf"}


def _smallest(problem: Problem, node: Node, way: int) -> tuple[int, int] | None:
    """Return the smallest shape with one long and one short side, or two equal sides if they are
    tied.
    """

    def shapes(long: int) -> list[tuple[int, int]]:
        if problem.tied_lengths:
            return [(long, long)]
        return [(SHORT, long)] if problem.aligned_to_end else [(long, NEAR), (SHORT, long)]

    for number in range(len(shapes(1))):
        least, long = NEAR, 2 * NEAR
        far = FAR_TIED if problem.tied_lengths else FAR
        while long <= far and way not in _taken(problem, node, *shapes(long)[number]):
            least, long = long, 2 * long
        if long > far:
            continue
        while long - least > STEP:
            half = (least + long) // 2
            if way in _taken(problem, node, *shapes(half)[number]):
                long = half
            else:
                least = half
        return shapes(long + MARGIN)[number]
    return None


def _taken(problem: Problem, node: Node, sq: int, sk: int) -> set[int]:
    """Return the ways of a node among pairs of the first and last positions, for any values of
    buffers.
    """
    params = {p.name: 1 if p.value is None else p.value for p in problem.params}
    sizes = {"B": 1, "HQ": 1, "HKV": 1, "SQ": sq, "SK": sk, ANY: max(sq, sk), "b": 0, "h": 0}
    random = torch.Generator().manual_seed(0)
    buffers = {}
    for b in problem.buffers:
        shape = [n if isinstance(n, int) else sizes[n] for n in b.shape]
        # Integers and truth values are constant, so their decisions do not depend on positions.
        real = DTYPES[b.dtypes[0]].is_floating_point
        buffers[b.name] = torch.rand(shape, generator=random) if real else torch.ones(shape)
    env = {**sizes, **params, **buffers, "kv_lens": torch.tensor([sk]), "score": 1.0}
    queries, keys = (
        torch.tensor(sorted({*range(min(n, NEAR)), *range(max(0, n - NEAR), n)})) for n in (sq, sk)
    )
    first = sk - sq if problem.aligned_to_end else 0
    return ways_taken(problem, node, env, first + queries, keys)


def ways_taken(
    problem: Problem, node: Node, env: Mapping[str, Any], queries: Tensor, keys: Tensor
) -> set[int]:
    """Return the ways of a node of the mask or the score among pairs of positions at which it
    decides.
    """
    env = {"inf": torch.inf, **env, "q_idx": queries[:, None], "kv_idx": keys[None, :]}
    shape = (len(queries), len(keys))
    shown: Tensor = torch.ones(shape, dtype=torch.bool)
    found: set[int] = set()
    if problem.mask_mod is not None:
        if node in decisions(problem.mask_mod):
            found |= decided(problem.mask_mod, node, env, shape, shown)
        shown = evaluate(problem.mask_mod, env, torch).expand(shape)
    if problem.score_mod is not None and node in decisions(problem.score_mod):
        found |= decided(problem.score_mod, node, env, shape, shown)
    return found

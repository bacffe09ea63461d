"""Hoisting changes the place and the number of computations, but not the values."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.specs.trees import POSITIVE, bounded, evaluate, mask, score
from test_softmax_form import SQ, points, score_mods
from test_tile_ranges import MASKS

from kgen.expr.algebra import Algebra
from kgen.expr.hoist import OUTSIDE, TILE, Place, Program, hoist, place_of, regroup
from kgen.expr.nodes import Call, Node, Read, Type, Var, children, substitute, variables, walk
from kgen.expr.softmax_form import softmax_form

ROW, COLUMN = Place(False, ("q",)), Place(True, ("kv",))
FORWARD = {"q_idx": ROW, "kv_idx": COLUMN, "kv_start": Place(True, ()), "qk": TILE, "score": TILE}
BACKWARD = {
    "q_idx": Place(True, ("q",)),
    "kv_idx": Place(False, ("kv",)),
    "q_start": Place(True, ()),
    "qk": TILE,
    "score": TILE,
}
PAIR = FORWARD | {"b": Place(True, ()), "h": Place(True, ())}
LOOPS = {"forward": FORWARD, "backward": BACKWARD, "pair": PAIR}


def in_full(node: Node, program: Program) -> Node:
    """Replace every bound name by its expression."""
    full: dict[Node, Node] = {}
    for binding in program.bindings:
        full[Var(binding.name, binding.node.type)] = substitute(binding.node, full)
    return substitute(node, full)


def check_places(
    program: Program, places: Mapping[str, Place], wanted: Mapping[str, Place]
) -> None:
    seen: set[str] = set()
    for binding in program.bindings:
        assert binding.name not in seen
        assert binding.name not in places
        bound = {v for v in variables(binding.node) if v in {b.name for b in program.bindings}}
        assert bound <= seen, f"{binding.name} comes before what it uses"
        seen.add(binding.name)
        # A binding is in the outermost place that its variables allow.
        assert binding.place == place_of(in_full(binding.node, program), places)
        assert binding.roots <= set(program.results)
        check_operands(binding.node, binding.place, program)
    for name, node in program.results.items():
        check_operands(node, wanted[name], program)
        used = variables(node)
        assert all(name in b.roots for b in program.bindings if b.name in used)


def check_operands(node: Node, user: Place, program: Program) -> None:
    """Check that no operand could be computed further out."""
    for inner in walk(node):
        if isinstance(inner, Call | Read) and inner is not node:
            place = program.place(inner)
            assert place.in_loop == user.in_loop, f"{inner} is the same for every tile"
            assert place.axes in ((), user.axes), (
                f"{inner} is the same along a whole axis of the tile"
            )


@settings(bounded, max_examples=150)
@given(score_mods(), MASKS, st.sampled_from(sorted(LOOPS)), st.integers(0, 7))
def test_values_and_places(text: str, condition: str, loop: str, seed: int) -> None:
    places, env = LOOPS[loop], points(seed)
    if "docs[b,q_idx]" in condition or "kind" in condition or "doc[" in condition:
        env |= {"SK": SQ}
    form = softmax_form(score(text), Algebra(POSITIVE))
    roots = {
        "core": form.core,
        "qk_scale": form.multiplier,
        "mask": mask(condition),
        "score": score(text),
    }
    if form.bias is not None:
        roots["bias"] = form.bias
    wanted = dict.fromkeys(roots, TILE)
    if form.row_rest is not None:
        roots["row_rest"] = form.row_rest
        wanted["row_rest"] = (
            places["q_idx"] | places.get("h", OUTSIDE) | places.get("q_start", OUTSIDE)
        )
    program = hoist(
        {name: (node, wanted[name]) for name, node in roots.items()}, places, reserved=env
    )
    check_places(program, places, wanted)

    values = dict(env)
    for binding in program.bindings:
        assert binding.name not in env, "a binding takes a reserved name"
        values[binding.name] = evaluate(binding.node, values)
    for name, node in program.results.items():
        got, want = evaluate(node, values), evaluate(roots[name], env)
        assert got.dtype == want.dtype
        both = torch.broadcast_tensors(got, want)
        if got.dtype.is_floating_point:
            assert torch.allclose(*both, rtol=1e-9, atol=1e-9, equal_nan=True), name
        else:
            assert torch.equal(*both), name


def names(program: Program) -> dict[str, Place]:
    return {b.name: b.place for b in program.bindings}


def test_alibi_in_the_forward_loop() -> None:
    form = softmax_form(score("score + slopes[h] * (kv_idx - q_idx)"), Algebra())
    assert form.bias is not None
    roots = {"qk_scale": (form.multiplier, TILE), "bias": (form.bias, TILE)}
    program = hoist(roots, FORWARD | {"q_start": OUTSIDE})
    places = names(program)
    assert places["slopes_h"] == places["bias_h"] == places["qk_scale"] == OUTSIDE
    assert places["bias_kv"] == COLUMN
    assert isinstance(program.results["bias"], Var)
    assert {b.name for b in program.before_loop()} == {"slopes_h", "bias_h", "qk_scale"}
    assert [b.name for b in program.in_loop()] == ["bias_kv"]


def test_scalars_of_a_product_are_multiplied_once() -> None:
    tree = score("score * cap * columns[kv_idx] * gain * slopes[h]")
    program = hoist({"s": (tree, TILE)}, FORWARD)
    product = program.results["s"]
    assert isinstance(product, Call)
    assert product.args[1] == Var("score", Type.FLOAT)
    assert isinstance(product.args[0], Var)
    assert program.places[product.args[0].name] == COLUMN


def test_scores_are_not_divided_one_by_one() -> None:
    program = hoist({"core": (score("tanh(score * gain / cap)"), TILE)}, FORWARD)
    core = program.results["core"]
    assert not [n for n in walk(core) if isinstance(n, Call) and n.fn == "div"]
    assert [b.place for b in program.bindings] == [OUTSIDE]


def test_positions_are_divided_exactly() -> None:
    """6 * (1 / 3) may come out below 2, and its floor would be 1."""
    tree = score("floor(kv_idx / 3)")
    assert hoist({"r": (tree, COLUMN)}, FORWARD).results["r"] == tree


def test_what_is_used_twice_is_computed_once() -> None:
    tree = mask("abs(q_idx - kv_idx) < window and abs(q_idx - kv_idx) > 1")
    program = hoist({"mask": (tree, TILE)}, FORWARD)
    (distance,) = (b for b in program.bindings if "abs" in repr(b.node))
    assert distance.place == TILE


def test_bindings_know_what_needs_them() -> None:
    roots = {"s": (score("score + columns[kv_idx]"), TILE), "mask": (mask("kv_idx % 3 < 2"), TILE)}
    program = hoist(roots, FORWARD)
    assert all(b.roots == {"mask"} for b in program.in_loop(needed_by=["mask"]))
    assert {b.name for b in program.in_loop(needed_by=["mask"])} | {
        b.name for b in program.in_loop(without=["mask"])
    } == set(names(program))


@settings(bounded, max_examples=60)
@given(score_mods(), st.sampled_from(sorted(LOOPS)))
def test_regrouping_is_stable(text: str, loop: str) -> None:
    once = regroup(score(text), LOOPS[loop])
    assert regroup(once, LOOPS[loop]) == once


@pytest.mark.parametrize("text", ["q_idx", "3", "h + 1", "columns[kv_idx]"])
def test_small_results(text: str) -> None:
    tree = score(text)
    program = hoist({"r": (tree, TILE)}, FORWARD)
    env = points(0)
    for b in program.bindings:
        env[b.name] = evaluate(b.node, env)
    want = evaluate(tree, points(0))
    assert torch.equal(*torch.broadcast_tensors(evaluate(program.results["r"], env), want))
    assert program.results["r"].type in (Type.INT, Type.FLOAT)
    assert all(
        not isinstance(c, Read) for c in (program.results["r"], *children(program.results["r"]))
    )

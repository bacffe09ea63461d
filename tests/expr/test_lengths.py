"""Lengths of buffers and indices from the end: spellings that are one tree, errors, bounds, and the
text of a tree.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from kgen.expr.index_ranges import IndexRanges
from kgen.expr.nodes import Call, Const, Node, Read, Type, Var, buffers_of, length_of
from kgen.expr.parse import parse_expression
from kgen.expr.scope import BufferType, Scope
from kgen.expr.text_checks import ExpressionError
from kgen.expr.unparse import show
from kgen.verify.evaluate import evaluate

SHAPES: Mapping[str, tuple[int | str, ...]] = {
    "cu": ("any",),
    "t": ("HQ", "any"),
    "w": (8,),
    "one": (),
}
SCOPE = Scope(
    dict.fromkeys(("h", "q_idx", "kv_idx", "HQ", "n"), Type.INT),
    {name: BufferType.of(Type.INT, shape, "any") for name, shape in SHAPES.items()},
)


def parsed(text: str, scope: Scope = SCOPE) -> Node:
    return parse_expression(text, scope, Type.INT)


ALIKE = (
    ("len(cu)", "cu.shape[0]", "cu.shape[-1]", "cu.size(0)", "cu.size(dim=-1)"),
    ("t.shape[1]", "t.shape[-1]", "t.size(1)", "t.size(-1)"),
    ("HQ", "len(t)", "t.shape[0]", "t.size(-2)"),
    ("8", "len(w)", "w.shape[0]"),
    ("cu[-1]", "cu[len(cu) - 1]", "cu[cu.size(0) - 1]"),
    ("cu[-2]", "cu[len(cu) - 2]"),
    ("t[h, -1]", "t[h, t.shape[1] - 1]"),
    ("t[-1, -3]", "t[HQ - 1, t.size(1) - 3]"),
    ("w[-8]", "w[0]"),
)


@pytest.mark.parametrize("spellings", ALIKE, ids=lambda texts: texts[0])
def test_spellings_of_one_length_are_one_tree(spellings: tuple[str, ...]) -> None:
    assert len({parsed(text) for text in spellings}) == 1
    assert parsed(show(parsed(spellings[0]))) == parsed(spellings[0])


WRONG = {
    "w[-9]": (3, "the index -9 is out of bounds", "from -8 to 7"),
    "cu.size(1)": (1, "no axis 1", "from 0 to 0"),
    "t.shape[-3]": (1, "no axis -3", "from 0 to 1"),
    "cu.size()": (1, "one literal integer", "`len(cu)`"),
    "cu.size(n)": (1, "one literal integer", "`len(cu)`"),
    "cu.shape[h]": (1, "one literal integer", "`len(cu)`"),
    "cu.shape[0:1]": (1, "one literal integer", "`len(cu)`"),
    "cu.size(axis=0)": (1, "one literal integer", "`len(cu)`"),
    "cu.shape": (1, "has no axis", "`cu.shape[0]`"),
    "1 + cu.size": (5, "has no axis", "`cu.size(0)`"),
    "len(h)": (5, "`len` takes a buffer", "name of a buffer"),
    "len(cuu)": (5, "`len` takes a buffer", "`cu`"),
    "len(cu[0])": (5, "`len` takes a buffer", "name of a buffer"),
    "len(cu, t)": (1, "takes 1 buffer, got 2", "len(buffer)"),
    "len()": (1, "takes 1 buffer, got 0", "len(buffer)"),
    "len(one)": (1, "has no axes", "`one`"),
    "one.shape[0]": (1, "has no axes", "`one`"),
    "cu.numel()": (1, "attribute access", "len(t)"),
    "h.size(0)": (1, "attribute access", ""),
    "cu.__len__()": (1, "double underscore", ""),
    "len": (1, "is not defined", ""),
}


@pytest.mark.parametrize("text", WRONG)
def test_mistakes_are_told_where_they_are(text: str) -> None:
    column, message, hint = WRONG[text]
    with pytest.raises(ExpressionError) as error:
        parsed(text)
    assert (error.value.line, error.value.column) == (1, column)
    assert message in error.value.message
    assert hint in (error.value.hint or "")


def test_a_name_may_be_len() -> None:
    scope = Scope({"len": Type.INT}, {"cu": BufferType.of(Type.INT, ("any",), "any")})
    assert parsed("len + len(cu)", scope) == Call(
        "add", (Var("len", Type.INT), length_of("cu", 0)), Type.INT
    )


def test_without_extents_there_are_no_lengths() -> None:
    """Expressions of other families have buffers of no shape."""
    scope = Scope({}, {"g": BufferType(Type.INT, 1)})
    for text in ("len(g)", "g.shape[0]"):
        with pytest.raises(ExpressionError):
            parsed(text, scope)
    assert parsed("g[-1]", scope) == Read("g", (Const(-1, Type.INT),), Type.INT)


@pytest.mark.parametrize(
    "text", ["cu[n]", "cu[0 - 1]", "cu[-n]", "cu[-1 + 0]", "cu[q_idx - kv_idx]"]
)
def test_only_a_literal_counts_from_the_end(text: str) -> None:
    cu = torch.tensor([3, 5, 9])
    env = {"cu": cu, "n": -1 if text == "cu[n]" else 1, "q_idx": 0, "kv_idx": 1}
    assert evaluate(parsed(text), env, torch).item() == 0


@pytest.mark.parametrize("number", range(4))
def test_values_are_those_of_pytorch_or_zero(number: int) -> None:
    cu = torch.arange(10, 10 + number)
    got = [
        evaluate(parsed(text), {"cu": cu}, torch).item() for text in ("len(cu)", "cu[-1]", "cu[-2]")
    ]
    assert got == [number, cu[-1].item() if number else 0, cu[-2].item() if number > 1 else 0]


def test_a_folded_index_below_zero_is_not_written_as_one_from_the_end() -> None:
    read = Read("cu", (Const(-1, Type.INT),), Type.INT)
    assert show(read) == "cu[+-1]"


def test_what_is_known_of_a_length() -> None:
    ranges = IndexRanges({}, frozenset())
    length = length_of("cu", 0)
    assert ranges.not_negative(length)
    assert not ranges.not_negative(parsed("len(cu) - 1"))  # the buffer may be empty
    assert ranges.not_negative(parsed("max(len(cu) - 1, 0)"))
    assert ranges.below(parsed("len(cu) - 1"), length)
    assert ranges.below(parsed("min(kv_idx, len(cu) - 2)"), length)
    assert not ranges.below(length, length)
    assert not ranges.below(parsed("len(cu) - 1"), length_of("t", 1))


def test_a_length_uses_its_buffer() -> None:
    assert buffers_of(parsed("w[h] + len(cu) + t[h, -1]")) == ("w", "cu", "t")

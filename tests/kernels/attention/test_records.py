"""Named tuples of the Hopper kernels."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import triton.language as tl
from support.interpreters.single_file import single

from kgen.kernels.attention.schedules.hopper.records import TAKEN, field_of, reached, record
from kgen.spec.load import load
from kgen.targets.code import assign, lines_of, row
from kgen.targets.folding import COLUMNS

ROOT = Path(__file__).resolve().parents[3]


def test_a_record_is_made_of_the_values_of_its_fields() -> None:
    made = record("Problem", "problem", ["B", "scale"], {"scale": "factor"})
    assert made.made.lines(COLUMNS) == ["problem = Problem(B, factor)"]
    assert made.defined.lines(COLUMNS) == [
        'Problem = collections.namedtuple("Problem", ["B", "scale"])'
    ]
    assert made.reach == {"B": "problem.B", "scale": "problem.scale"}


def test_fields_are_no_attributes_of_the_tuples_of_triton() -> None:
    """A field with such a name would be the attribute of Triton's tuple."""
    of_a_tuple = tl.core.tuple([])
    own = {name for name in [*dir(of_a_tuple), *vars(of_a_tuple)] if not name.startswith("_")}
    assert own <= TAKEN
    assert record("Fixed", "fixed", ["values"]).reach == {"values": "fixed.values_"}
    assert not own & {field_of(name) for name in own}


def test_names_are_reached_where_they_are_used() -> None:
    line = assign("SQ", row("add", "SQ", "SK"))
    found = reached([line], {"SQ": "problem.SQ"})
    assert lines_of(found) == ["SQ = problem.SQ + SK"]


HANDED_ON = {
    "args",
    "operands",
    "problem",
    "fixed",
    "slots",
    "q_descs",
    "factors",
    "ds_ring",
    "ds_tiles",
}


@pytest.mark.parametrize(
    "name", ["causal", "gemma2", "varlen_causal", "decode_paged", "mla_prefill"]
)
def test_what_functions_are_given_is_not_unpacked_by_position(name: str) -> None:
    tree = ast.parse(single(load(ROOT / "specs" / f"{name}.yaml")))
    unpacked = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and ast.unparse(node.value).rpartition(".")[2] in HANDED_ON
    ]
    assert not unpacked


@pytest.mark.parametrize(
    "name", ["causal", "gemma2", "varlen_causal", "decode_paged", "mla_prefill"]
)
def test_lines_of_kernels_fit(name: str) -> None:
    text = single(load(ROOT / "specs" / f"{name}.yaml"))
    kernels = text.partition("# --- on Hopper")[2].partition("# --- launch on Hopper")[0]
    assert kernels
    assert [line for line in kernels.splitlines() if len(line) > COLUMNS] == []

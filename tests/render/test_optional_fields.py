"""Blocks of optional fields: templates print them, and hashes of other files leave them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from kgen.render.environment import texts_of, without_blocks
from kgen.targets.template import Template

NAMES = frozenset({"row_max", "top"})


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a\n{% if row_max %}\nb\n{% endif %}\nc", "a\nc"),
        ("{% if row_max %}\nb\n{% else %}\nc\n{% endif %}", "c"),
        (
            "{% if other %}\n{% if top %}\nb\n{% endif %}\nc\n{% endif %}",
            "{% if other %}\nc\n{% endif %}",
        ),
        ("{% if top %}\n{% if other %}\nb\n{% else %}\nc\n{% endif %}\nd\n{% endif %}\ne", "e"),
        ("{% if top %}\na\n{% else %}\n{% if row_max %}\nb\n{% endif %}\nc\n{% endif %}", "c"),
        ("{% if other %}\na\n{% else %}\nb\n{% endif %}", None),
        ("a{% if row_max %} b{% endif %}\nc", None),
        ("{% for x in row_max %}\n{{ x }}\n{% endfor %}", None),
    ],
    ids=["block", "else", "inside", "around", "inside else", "another", "in a line", "a loop"],
)
def test_blocks_are_left_out(text: str, left: str | None) -> None:
    assert without_blocks(text, NAMES) == (text if left is None else left)
    assert without_blocks(text, frozenset()) == text


@dataclass(frozen=True)
class Sample(Template):
    """A template with an optional field."""

    template: ClassVar[str] = "attention/triton/_docstring.j2"
    optional_fields: ClassVar[tuple[str, ...]] = ("row_max",)

    row_max: bool


@dataclass(frozen=True)
class Both(Template):
    """A template whose parts differ in the field."""

    template: ClassVar[str] = "attention/triton/_aligned.j2"

    parts: list[Sample]


def test_a_file_has_the_blocks_of_its_fields() -> None:
    name = Sample.template
    whole, without = (texts_of(Sample(there))[name] for there in (True, False))
    assert "{% if row_max %}" in whole
    assert "row_max" not in without
    for parts in ([True, False], [False, True]):
        assert texts_of(Both([Sample(there) for there in parts]))[name] == whole

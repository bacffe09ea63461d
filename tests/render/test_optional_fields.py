"""Optional fields: templates print them, and hashes of other files leave them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from kgen.render.environment import texts_of, without_missing
from kgen.targets.template import Template

NAMES = frozenset({"rows", "top"})


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a\n{% if rows %}\nb\n{% endif %}\nc", "a\nc"),
        ("{% if rows %}\nb\n{% else %}\nc\n{% endif %}", "c"),
        (
            "{% if other %}\n{% if top %}\nb\n{% endif %}\nc\n{% endif %}",
            "{% if other %}\nc\n{% endif %}",
        ),
        ("{% if top %}\n{% if other %}\nb\n{% else %}\nc\n{% endif %}\nd\n{% endif %}\ne", "e"),
        ("{% if top %}\na\n{% else %}\n{% if rows %}\nb\n{% endif %}\nc\n{% endif %}", "c"),
        ("{% if other %}\na\n{% else %}\nb\n{% endif %}", None),
        ("a{% if rows %} b{% endif %}\nc", None),
        ("a\n{% for x in rows %}\n{{ x }}\n{% endfor %}\nb", "a\nb"),
        ("{% for x in of.rows %}\n{{ x }}\n{% endfor %}", None),
        (
            "{% for x in other %}\n{% if top %}\na\n{% else %}\nb\n{% endif %}\n{% endfor %}",
            "{% for x in other %}\nb\n{% endfor %}",
        ),
        ("f(a, {{ top | ahead }}b{{ rows | each('{}=0') | behind }})", "f(a, b)"),
        ("f({{ topmost }}, {{ other.top }}, {{ other | ahead }})", None),
        ("a\n    {{ top | each('{},') }}\n\nb", "a\n\nb"),
    ],
    ids=[
        *("block", "else", "inside", "around", "inside else", "another", "in a line", "a loop"),
        *("another loop", "inside a loop", "operands", "other operands", "a line"),
    ],
)
def test_missing_fields_are_left_out(text: str, left: str | None) -> None:
    assert without_missing(text, NAMES) == (text if left is None else left)
    assert without_missing(text, frozenset()) == text


def test_texts_count_with_their_values() -> None:
    text = '"""{{ words }}.""" {{ words | join }}{{ suffix }}'
    values = {"words": "Compute out", "suffix": ""}
    assert without_missing(text, frozenset({"suffix"}), frozenset(values.items())) == (
        '"""Compute out.""" {{ words | join }}'
    )


@dataclass(frozen=True)
class Sample(Template):
    """A template with an optional field."""

    template: ClassVar[str] = "attention/triton/_docstring.j2"
    optional_fields: ClassVar[tuple[str, ...]] = ("row_results",)

    row_results: list[str]


@dataclass(frozen=True)
class Both(Template):
    """A template whose parts differ in the field."""

    template: ClassVar[str] = "attention/triton/_aligned.j2"

    parts: list[Sample]


def test_a_file_has_the_blocks_of_its_fields() -> None:
    name = Sample.template
    whole, without = (texts_of(Sample(there))[name] for there in (["max"], []))
    assert "{% for row in row_results %}" in whole
    assert "row_results" not in without
    for parts in ([["max"], []], [[], ["max"]]):
        assert texts_of(Both([Sample(there) for there in parts]))[name] == whole

"""Templates only print prepared values: they loop over a list, test one name, or call a macro."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from jinja2 import Environment, nodes
from jinja2.meta import find_referenced_templates

from kgen.family import NAMES
from kgen.render.environment import environment, referenced, template_texts
from kgen.render.filters import FILTERS as OURS
from kgen.spec.load import load
from kgen.targets import asked_targets, sources
from kgen.targets.code import Code, Statement, printed
from kgen.targets.template import names

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "templates"
FILTERS = {"fake_of", "indent", "join", "lines", *OURS}
PLAIN = (
    nodes.Template,
    nodes.Output,
    nodes.TemplateData,
    nodes.Name,
    nodes.Getattr,
    nodes.Const,
    nodes.Keyword,
    nodes.Block,
    nodes.Extends,
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.Macro,
    nodes.CallBlock,
)


def logic_in(source: str, env: Environment | None = None) -> list[str]:
    """Return the forbidden constructs of a template as `line: construct`."""
    tree = (env or environment(TEMPLATES)).parse(source)
    macros = _macros(tree)
    return [
        f"{node.lineno}: {problem}" for node in _walk(tree) if (problem := _problem(node, macros))
    ]


def _walk(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    for child in node.iter_child_nodes():
        yield from _walk(child)


def _macros(tree: nodes.Template) -> set[str]:
    """Return the names that a call may start with: own and imported macros, and imported
    modules.
    """
    names = {"caller", "super"}
    for node in _walk(tree):
        if isinstance(node, nodes.Macro):
            names.add(node.name)
        elif isinstance(node, nodes.Import):
            names.add(node.target)
        elif isinstance(node, nodes.FromImport):
            names.update(name if isinstance(name, str) else name[1] for name in node.names)
    return names


def _is_field(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) or (
        isinstance(node, nodes.Getattr) and _is_field(node.node)
    )


def _problem(node: nodes.Node, macros: set[str]) -> str | None:
    if isinstance(node, nodes.If):
        test = node.test.node if isinstance(node.test, nodes.Not) else node.test
        return None if _is_field(test) else "an `if` may test one name, or `not` of it"
    if isinstance(node, nodes.For):
        names = node.target.items if isinstance(node.target, nodes.Tuple) else [node.target]
        plain = _is_field(node.iter) and all(isinstance(name, nodes.Name) for name in names)
        return (
            None
            if plain and not node.test and not node.recursive
            else "a `for` may only run over a name"
        )
    if isinstance(node, nodes.Filter | nodes.FilterBlock):
        names = [node.filter.name] if isinstance(node, nodes.FilterBlock) else [node.name]
        return None if FILTERS.issuperset(names) else f"the filter `{names[0]}`"
    if isinstance(node, nodes.Call):
        root = node.node
        while isinstance(root, nodes.Getattr):
            root = root.node
        known = isinstance(root, nodes.Name) and root.name in macros
        return None if known else "a call of something that is not a macro"
    if isinstance(node, nodes.Not | nodes.Tuple):
        return None if _allowed_by_parent(node) else type(node).__name__
    return None if isinstance(node, PLAIN) else type(node).__name__


def _allowed_by_parent(node: nodes.Node) -> bool:
    """True for nodes that their parent checks: `not` in an `if`, and a tuple as target of a
    `for`.
    """
    if isinstance(node, nodes.Tuple):
        return node.ctx == "store"
    return isinstance(node, nodes.Not) and _is_field(node.node)


def templates() -> list[str]:
    return sorted(path.relative_to(TEMPLATES).as_posix() for path in TEMPLATES.rglob("*.j2"))


@pytest.mark.parametrize("name", templates())
def test_what_a_template_names_is_found(name: str) -> None:
    """Jinja finds the names, which also shows that no name is computed."""
    text = (TEMPLATES / name).read_text(encoding="utf-8")
    assert referenced(text) == [*find_referenced_templates(environment(TEMPLATES).parse(text))]


@pytest.mark.parametrize("name", templates())
def test_templates_have_no_logic(name: str) -> None:
    assert logic_in((TEMPLATES / name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "{{ name }} {{ plan.tile.m }} {{ 'text' }} {# a comment #}",
        "{% if plan.causal %}a{% elif not b %}c{% else %}d{% endif %}",
        "{% for x in plan.buffers %}{{ x.name }}{% if not loop.last %}, {% endif %}{% endfor %}",
        "{% for name, value in constants %}{{ name }}{% endfor %}",
        "{{ lines | indent(8) }}{{ names | join(', ') }}",
        "{% filter indent(4) %}{{ body }}{% endfilter %}",
        "{% macro load(x, y=1) %}{{ x }}{% endmacro %}{{ load(plan.q) }}",
        "{% import '_m.j2' as m %}{{ m.load('q', y=plan.y) }}",
        "{% from '_m.j2' import load as l %}{% call l() %}{{ x }}{% endcall %}",
        "{% extends 'base.j2' %}{% block body %}{{ super() }}{% endblock %}",
        "{% include '_m.j2' %}",
    ],
)
def test_what_a_template_may_do(source: str) -> None:
    assert logic_in(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "{{ a + 1 }}",
        "{{ a ~ b }}",
        "{{ -a }}",
        "{{ a if b else c }}",
        "{{ a == b }}",
        "{{ not a }}{{ a and b }}",
        "{{ items[0] }}",
        "{{ a | upper }}",
        "{{ a | default('b') }}",
        "{{ range(3) }}",
        "{{ a.strip() }}",
        "{{ [1, 2] }}",
        "{{ (1, 2) }}",
        "{% set a = 1 %}",
        "{% set a %}1{% endset %}",
        "{% with a = 1 %}{% endwith %}",
        "{% if a == 1 %}{% endif %}",
        "{% if a and b %}{% endif %}",
        "{% if a is defined %}{% endif %}",
        "{% if f() %}{% endif %}",
        "{% for x in range(3) %}{% endfor %}",
        "{% for x in xs if x.ok %}{% endfor %}",
        "{% for x in xs | sort %}{% endfor %}",
        "{% for x in xs recursive %}{% endfor %}",
        "{% filter upper %}{% endfilter %}",
    ],
)
def test_what_a_template_may_not_do(source: str) -> None:
    assert logic_in(source)


KERNELS = ("triton", "hopper", "decode", "portable")
MOST_CONDITIONALS, MOST_FIELDS = 100, 250
"""The limits of the templates of attention: a reader has to follow every variant."""


def conditionals_in(source: str) -> int:
    """Return the number of `if` tags."""
    return len(re.findall(r"\{%[-+]?\s*if\b", source))


def fields_in(source: str) -> set[str]:
    """Return the dotted names in tags and expressions."""
    tags = (re.sub(r'"[^"]*"', "", tag) for tag in re.findall(r"\{[{%](.*?)[%}]\}", source, re.S))
    return {name for tag in tags for name in re.findall(r"\b[a-z_]\w*(?:\.\w+)+", tag)}


def test_kernels_of_attention_have_few_conditionals() -> None:
    """A variant is an operand, an entry of a list, or another template."""
    folders = [TEMPLATES / "attention" / name for name in KERNELS]
    sources = [path.read_text("utf-8") for folder in folders for path in folder.rglob("*.j2")]
    assert len(sources) > 50
    assert sum(map(conditionals_in, sources)) <= MOST_CONDITIONALS
    assert len({name for source in sources for name in fields_in(source)}) <= MOST_FIELDS


def test_conditionals_and_fields_are_counted() -> None:
    source = "if a.b\n{% if a %}{{ b.c.d | f('x') }}{%- if not e %}{% for x in g.h %}{% endif %}"
    assert conditionals_in(source) == 2
    assert fields_in(source + '{{ i | each("{j.k}") }}') == {"b.c.d", "g.h"}


@pytest.mark.parametrize("name", templates())
def test_templates_of_a_family_know_no_other(name: str) -> None:
    """A template in a family's folder uses templates of its own or of shared folders.

    Shared ones use no family.
    """
    own, _, _ = name.partition("/")
    used = {text.partition("/")[0] for text in template_texts(environment(TEMPLATES), name)}
    assert used & {*NAMES} <= {own}


SPECS = sorted([*ROOT.glob("specs/*.yaml"), *ROOT.glob("tests/specs/*.yaml")])
SAMPLE = (
    "causal_alibi",
    "varlen_causal",
    "decode_paged",
    "natten_2d",
    "pair_bias",
    "mla_prefill",
    "gated_delta_output",
)
SAMPLE += ("rms_norm", "layer_norm", "relative_bias")


def loose(value: object, path: str) -> Iterator[str]:
    """Yield texts that begin or end with a separator.

    Separators belong to templates and filters.
    """
    if isinstance(value, Code | Statement):
        value = printed(value)
    if isinstance(value, str):
        if value and {value[0], value[-1]} & {",", " "}:
            yield f"{path}: {value!r}"
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from loose(part, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for part in value:
            yield from loose(part, f"{path}[]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from loose(getattr(value, field.name), f"{path}.{field.name}")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[] if path.stem in SAMPLE else pytest.mark.thorough, id=path.stem)
        for path in SPECS
    ],
)
def test_no_operand_brings_its_comma(path: Path) -> None:
    loaded = load(path)
    found = [source for target in asked_targets(loaded) for source in sources(loaded, target)]
    assert found
    templates = [
        text for source in found for text in (source.text, source.alone) if text is not None
    ]
    assert [text for template in templates for text in loose(names(template), path.stem)] == []


def test_an_operand_that_brings_its_comma_is_found() -> None:
    assert [*loose({"a": ["x", "y, "], "b": ("", " z")}, "of")] == ["of.a[]: 'y, '", "of.b[]: ' z'"]

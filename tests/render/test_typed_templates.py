"""Every name in a template is a field of its dataclass, checked without rendering."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from jinja2 import DictLoader
from render.resolving import Resolver, conflicts, subclasses

import kgen
from kgen.render.environment import environment, rendered, template_root
from kgen.targets.code import GLUON, Code, Name, assign, op
from kgen.targets.template import Template, filled, names, parts

PACKAGE = Path(kgen.__file__).parent


def typed() -> list[type[Template]]:
    """Return every dataclass of kgen with a template."""
    for path in PACKAGE.rglob("*.py"):
        if "    template: ClassVar[str]" in path.read_text(encoding="utf-8"):
            importlib.import_module(
                ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            )
    return [one for one in subclasses(Template) if one.__module__.startswith("kgen.")]


@pytest.mark.parametrize("cls", typed(), ids=lambda cls: cls.__qualname__)
def test_every_name_is_a_field(cls: type[Template]) -> None:
    assert Resolver(environment(template_root(), cls.language)).resolve(cls) == []


@pytest.mark.parametrize("cls", typed(), ids=lambda cls: cls.__qualname__)
def test_bases_agree_on_a_field(cls: type[Template]) -> None:
    assert [*conflicts(cls)] == []


@dataclass(frozen=True)
class Part:
    tag: str
    guard: Code | None = None


@dataclass(frozen=True)
class Whole(Template):
    template: ClassVar[str] = "whole.j2"

    name: str
    parts: Sequence[Part]
    pairs: tuple[tuple[str, Part], ...] = ()
    mapped: Any = None

    @property
    def upper(self) -> str:
        return self.name.upper()


def resolved(text: str, **more: str) -> list[str]:
    """Return the problems of a text, except for unused fields."""
    env = environment(template_root()).overlay(loader=DictLoader({"whole.j2": text, **more}))
    return [p.partition(": ")[2] for p in Resolver(env).resolve(Whole) if "never names" not in p]


@pytest.mark.parametrize(
    "text",
    [
        "{{ name }} {{ upper }}",
        "{% for part in parts %}{{ part.tag }}{{ part.guard | and }}{{ loop.index }}{% endfor %}",
        "{% for name, part in pairs %}{{ name }}{{ part.tag }}{% endfor %}",
        (
            "{% macro m(p, x='a') %}{{ p.tag }}{{ x }}{{ name }}{% endmacro %}{% for p in parts "
            "%}{{ m(p) }}{% endfor %}"
        ),
        (
            "{% from 'm.j2' import n with context %}{% for p in parts %}{% call n(p) %}{{ name "
            "}}{% endcall %}{% endfor %}"
        ),
        "{% for part in parts %}{% include 'i.j2' %}{% endfor %}",
        "{% if parts %}{{ name }}{% elif pairs %}{{ name }}{% else %}{{ upper }}{% endif %}",
    ],
)
def test_what_resolves(text: str) -> None:
    more = {
        "m.j2": "{% macro n(q) %}{{ q.tag }}{{ caller() }}{% endmacro %}",
        "i.j2": "{{ part.guard }}",
    }
    assert resolved(text, **more) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{{ nam }}", "there is no `nam`"),
        ("{{ parts.tag }}", "Part] has no `tag`"),
        ("{% for part in parts %}{{ part.tags }}{% endfor %}", "Part has no `tags`"),
        ("{% for part in parts %}{{ loop.lasts }}{% endfor %}", "there is no `loop.lasts`"),
        ("{% for part in parts %}{{ part }}{% endfor %}", "prints Part"),
        ("{% for a, b in parts %}{{ a }}{% endfor %}", "2 names for Part"),
        ("{% for part in name %}{{ part }}{% endfor %}", "a loop over str"),
        ("{% if nam %}{% endif %}", "there is no `nam`"),
        ("{% if name %}{% else %}{{ nam }}{% endif %}", "there is no `nam`"),
        ("{{ mapped.key }}", "Any has no `key`"),
        (
            "{% macro m(p) %}{{ p.tags }}{% endmacro %}{% for p in parts %}{{ m(p) }}{% endfor %}",
            "Part has no `tags`",
        ),
        ("{% macro m(p) %}{{ p.tag }}{% endmacro %}{{ m() }}", "`m` is called without an argument"),
        ("{% for part in parts %}{% include 'i.j2' %}{% endfor %}", "Part has no `guards`"),
        ("{{ name | behind }}{{ parts | join(nam) }}", "there is no `nam`"),
    ],
)
def test_what_does_not(text: str, problem: str) -> None:
    found = resolved(text, **{"i.j2": "{{ part.guards }}"})
    assert any(problem in one for one in found), found


def test_a_field_that_no_template_names() -> None:
    env = environment(template_root()).overlay(loader=DictLoader({"whole.j2": "{{ name }}"}))
    assert "whole.j2: never names `upper`" in Resolver(env).resolve(Whole)


@dataclass(frozen=True)
class Shared:
    tag: str
    guard: Code | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Own(Part, Shared, Template):
    template: ClassVar[str] = "own.j2"

    name: str = field(kw_only=True)


def test_inherited_names() -> None:
    env = environment(template_root()).overlay(loader=DictLoader({"own.j2": "{{ tag }}{{ tags }}"}))
    problems = ["own.j2:1: there is no `tags`", "own.j2: never names `name`"]
    assert Resolver(env).resolve(Own) == problems


@dataclass(frozen=True)
class Numbered:
    tag: int


@dataclass(frozen=True)
class Disagreeing(Part, Numbered, Template):
    template: ClassVar[str] = "own.j2"


def test_bases_that_disagree() -> None:
    assert [*conflicts(Own)] == []
    assert [*conflicts(Disagreeing)] == ["`tag` is str in Part, and int in Numbered"]


def test_bases_fill_a_template() -> None:
    assert filled(Own, Part("a", Name("x")), Shared("b"), name="n") == Own("a", Name("x"), name="n")
    assert filled(Own, Shared("b"), Part("a", Name("x")), name="n") == Own("b", None, name="n")
    with pytest.raises(AssertionError):
        filled(Own, Part("a"), Whole("w", []), name="n")
    with pytest.raises(TypeError, match="tag"):
        filled(Own, name="n")


@dataclass(frozen=True)
class Inner(Template):
    template: ClassVar[str] = "inner"
    language: ClassVar[str] = GLUON

    value: Code


@dataclass(frozen=True)
class Outer(Template):
    template: ClassVar[str] = "outer"

    inner: object
    value: Code
    none: object = None


def test_a_template_within_another_is_printed_in_its_own_language(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").write_text("{{ value }}\n")
    (tmp_path / "outer").write_text(
        "def f():\n    {{ inner }}\n    return {{ value }}\n{{ none }}\nend\n"
    )
    monkeypatch.setattr("kgen.render.environment.template_root", lambda: tmp_path)
    value = op("{tl}.max({0})", "x")
    inner = Inner(value)
    outer = Outer(inner, value)
    assert rendered(outer) == "def f():\n    gl.max(x)\n    return tl.max(x)\nend\n"
    assert [*parts(outer)] == [outer, inner]
    assert [*names(inner)] == ["value"]
    lines = [assign("a", value), assign("b", Name("a"))]
    listed = Outer(lines, Name("b"), ())
    assert rendered(listed) == "def f():\n    a = tl.max(x)\n    b = a\n    return b\nend\n"

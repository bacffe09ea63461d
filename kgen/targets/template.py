"""Templates as values: what a template prints are the fields of a frozen dataclass.

A `Template` that is a field of another one is rendered where that one names it, in its own language. So a file is a
tree of templates, and each of them sees its own fields alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from kgen.targets.code import TRITON


@dataclass(frozen=True)
class Template:
    """The base of all dataclasses that a template prints.

    Values and statements among the fields are printed in `language`, one of `kgen.targets.code.LANGUAGES`.
    """

    template: ClassVar[str]
    """The path of the template below `templates/`."""
    language: ClassVar[str] = TRITON


def names(template: Template) -> dict[str, object]:
    """What a template may name: its fields and properties."""
    return {name: getattr(template, name) for name in names_of(type(template))}


def names_of(cls: type[Template]) -> tuple[str, ...]:
    """The fields and properties of a dataclass, without private ones."""
    properties = (
        n for base in cls.__mro__ for n, member in vars(base).items() if isinstance(member, property)
    )
    own = dict.fromkeys([*(f.name for f in fields(cls)), *properties])
    return tuple(name for name in own if not name.startswith("_"))


def parts(value: object) -> Iterator[Template]:
    """Every template within a value, itself first: in fields of templates, in lists and in mappings."""
    if isinstance(value, Template):
        yield value
        value = names(value)
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for part in value:
            yield from parts(part)

"""Templates as values. The fields of a frozen dataclass are the variables of its template.

If a field is a `Template`, it is rendered where the outer template names it, in its own language.
So a file is a tree of templates, and each template sees only its own fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, TypeVar

from kgen.targets.code import TRITON


@dataclass(frozen=True)
class Template:
    """The base of all dataclasses that a template prints.

    Values and statements among the fields are printed in `language`, one of
    `kgen.targets.code.LANGUAGES`.
    """

    template: ClassVar[str]
    """The path of the template below `templates/`."""
    language: ClassVar[str] = TRITON
    optional_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that few specs have. Blocks, loops and expressions of an empty or false one do not
    count in the hash of a file's templates. A text counts with its value.
    """

    def launch_functions(self) -> Iterable[str]:
        """Return the names of `_launch.py` that the text of the template uses, without templates in
        its fields.
        """
        return ()


T = TypeVar("T")


def filled(cls: type[T], *bases: object, **own: object) -> T:
    """Return a dataclass with the fields of `bases`, which it inherits, and with `own` fields.

    If several bases have a field, the first base that has it decides.
    """
    assert all(issubclass(cls, type(base)) for base in bases)
    values = dict[str, object]()
    for base in reversed(bases):
        values |= {f.name: getattr(base, f.name) for f in fields(base)}  # type: ignore[arg-type]
    return cls(**(values | own))


def names(template: Template) -> dict[str, object]:
    """Return the variables of a template: its fields and properties."""
    return {name: getattr(template, name) for name in names_of(type(template))}


def names_of(cls: type[Template]) -> tuple[str, ...]:
    """Return the names of the public fields and properties of a dataclass."""
    properties = (
        n
        for base in cls.__mro__
        for n, member in vars(base).items()
        if isinstance(member, property)
    )
    own = dict.fromkeys([*(f.name for f in fields(cls)), *properties])
    return tuple(name for name in own if not name.startswith("_"))


def parts(value: object) -> Iterator[Template]:
    """Yield all templates in a value, the value first: in fields, lists and mappings."""
    if isinstance(value, Template):
        yield value
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for part in value:
            yield from parts(part)

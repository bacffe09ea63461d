"""Names of a spec within its files, apart from those that kernels and launchers have themselves.

`names.json` of a family has, for each kind of name that a spec gives (its own, buffers, params, constants, and values
that expressions name), the forms in which files have it, as `{name}_ptr`, and the files' own names beside it. Both are
collected from rendered files (`tests/support/specs/collecting.py`), so that no rendering has to look at one. The specs
of the repository do not have every name beside every kind, so buffers, params, constants and values keep away from the
names of all kinds, and from those of variables in trees. A name of a spec that would meet another one gets a suffix
before anything is planned; callers say what the spec says (`called`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from kgen.diagnostics import Diagnostic, KgenError
from kgen.family import KERNELS, family
from kgen.spec.renaming import SECTIONS, inside

if TYPE_CHECKING:
    from kgen.spec.load import Loaded

FILE = "names.json"
_NUMBER = re.compile(r"(?<=_)\d+(?=_|$)")
SUFFIX = "_arg"
"""Behind a name that gives way."""
KINDS = ("name", *SECTIONS, "constants", "values")
"""Kinds of names: the function, buffers, run-time params, constants, and values in kernels."""


@dataclass(frozen=True)
class Kind:
    """Names of one kind: the forms in which files have them, and the names that stand beside them."""

    forms: tuple[str, ...]
    own: frozenset[str]

    def made(self, name: str) -> frozenset[str]:
        """The forms of a name in files."""
        return frozenset(form.format(name=name, NAME=name.upper()) for form in self.forms)

    def has(self, made: frozenset[str]) -> bool:
        """True if a file has one of these names itself, or one with other numbers."""
        return not self.own.isdisjoint(made) or not self.own.isdisjoint(map(_counted, made))


@dataclass(frozen=True)
class OwnNames:
    """The names that the files of a family have themselves."""

    kinds: Mapping[str, Kind]
    function: frozenset[str]
    """Names that an argument of the function would hide."""
    trees: frozenset[str]
    """Names of variables that plans put into the trees of a spec."""


@cache
def own_names(kernel: str) -> OwnNames:
    """The names of a family's files; none of a family that they were not collected of."""
    path = KERNELS / kernel / FILE
    nothing: dict[str, Any] = {"kinds": {}, "function": [], "every": [], "trees": []}
    found = json.loads(path.read_text()) if path.exists() else nothing
    every = {*found["every"], *found["trees"]}
    kinds = {kind: Kind((), frozenset()) for kind in KINDS}
    for kind, of in found["kinds"].items():
        own = of["own"] if kind == "name" else every
        kinds[kind] = Kind(tuple(of["forms"]), frozenset([*own, *map(_counted, own)]))
    return OwnNames(kinds, frozenset(found["function"]), frozenset(found["trees"]))


def _counted(name: str) -> str:
    """A name with `#` for its numbers: `stride_x_0` and `side_0_max` stand for as many as there are."""
    return _NUMBER.sub("#", name)


def kinds_of(loaded: Loaded) -> dict[str, str]:
    """The names of a spec, in its order, and the kind of each."""
    params = getattr(loaded.spec, "params", {})
    constants = {name for name, param in params.items() if param.value is not None}
    found = {loaded.spec.name: "name"}
    for section in SECTIONS:
        for name in getattr(loaded.spec, section, ()):
            found[name] = "constants" if name in constants else section
    return found


def named_apart(loaded: Loaded, more: frozenset[str] = frozenset()) -> Loaded:
    """The spec with other names within its files for those that files have themselves, and for those in `more`.

    Raises `KgenError` where one cannot give way: the function's own, one that its arguments would hide, or any of a
    family whose names stay.
    """
    own, yields = own_names(loaded.spec.kernel), family(loaded.spec.kernel).names_give_way
    taken: set[str] = set()
    other: dict[str, str] = {}
    wrong: list[str] = []
    for name, kind in kinds_of(loaded).items():
        of, inner = own.kinds[kind], name
        in_trees = own.trees if kind != "name" else frozenset[str]()
        while of.has(made := of.made(inner)) or made & taken or inner in more or inner in in_trees:
            inner += SUFFIX
        if inner != name and (kind == "name" or not yields or _called(loaded, name) in own.function):
            wrong.append(name)
        elif inner != name:
            other[name] = inner
        taken |= made
    if wrong:
        raise KgenError([refusal(loaded, _called(loaded, name)) for name in wrong])
    return inside(loaded, other) if other else loaded


def taken_from_values(loaded: Loaded) -> frozenset[str]:
    """The names that values in kernels cannot have: the kernels' own, and those made of the spec's."""
    return frozenset(_taken(loaded))


def _taken(loaded: Loaded) -> Iterator[str]:
    own = own_names(loaded.spec.kernel)
    yield from own.kinds["values"].own
    for name, kind in kinds_of(loaded).items():
        yield from own.kinds[kind].made(name)
        yield name


def _called(loaded: Loaded, name: str) -> str:
    return loaded.called.get(name, name)


def refusal(loaded: Loaded, name: str) -> Diagnostic:
    """The error of a name that files have themselves."""
    from kgen.spec.source import Document

    document = Document(loaded.text, loaded.path.as_posix())
    message, hint = f"`{name}` is already a name in the emitted files", "choose another name"
    for section in SECTIONS:
        if name in document.data.get(section, ()):
            return document.key("name-taken", message, (section, name), hint)
    return document.value("name-taken", message, ("name",), hint)

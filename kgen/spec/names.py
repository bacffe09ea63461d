"""Rename the names of a spec that collide with names of the emitted files.

A spec has several kinds of names: its own, buffers, parameters, constants, and values that
expressions name. For each kind, `names.json` of a family lists the forms that files use, such as
`{name}_ptr`. It also lists the names that files define in the same scopes.
`tests/support/specs/collecting.py` collects both from rendered files. The specs of the repository
do not cover every pair of a file's name and a kind. Therefore buffers, parameters, constants and
values avoid the names of all kinds, and the names of variables in trees. A name that collides gets
a suffix before planning. Callers still use the name in the spec (`Loaded.called`).
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
"""The suffix of a name that is replaced."""
KINDS = ("name", *SECTIONS, "constants", "values")
"""Kinds of names: the function, buffers, run-time parameters, compile-time parameters, and values
in kernels.
"""


@dataclass(frozen=True)
class Kind:
    """One kind of names: the forms that files use, and the names of the files in the same
    scopes.
    """

    forms: tuple[str, ...]
    own: frozenset[str]

    def made(self, name: str) -> frozenset[str]:
        """Return all forms of a name in files."""
        return frozenset(form.format(name=name, NAME=name.upper()) for form in self.forms)

    def has(self, made: frozenset[str]) -> bool:
        """True if a file uses one of these names, or the same name with other numbers."""
        return not self.own.isdisjoint(made) or not self.own.isdisjoint(map(_counted, made))


@dataclass(frozen=True)
class OwnNames:
    """The names that the emitted files of a family use."""

    kinds: Mapping[str, Kind]
    function: frozenset[str]
    """Names that an argument of the function would shadow."""
    of_passes: Mapping[str, frozenset[str]]
    """More of these names in the files of specs with a pass, by pass."""
    trees: frozenset[str]
    """Names of variables that plans add to the trees of a spec."""


@cache
def own_names(kernel: str) -> OwnNames:
    """Return the names of a family's files; empty if the family has no `names.json`."""
    path = KERNELS / kernel / FILE
    nothing: dict[str, Any] = {
        "kinds": {},
        "function": [],
        "of_passes": {},
        "every": [],
        "trees": [],
    }
    found = json.loads(path.read_text()) if path.exists() else nothing
    every = {*found["every"], *found["trees"]}
    kinds = {kind: Kind((), frozenset()) for kind in KINDS}
    for kind, of in found["kinds"].items():
        own = of["own"] if kind == "name" else every
        kinds[kind] = Kind(tuple(of["forms"]), frozenset([*own, *map(_counted, own)]))
    of_passes = {name: frozenset(names) for name, names in found["of_passes"].items()}
    return OwnNames(kinds, frozenset(found["function"]), of_passes, frozenset(found["trees"]))


def _counted(name: str) -> str:
    """Replace the numbers in a name by `#`: `stride_x_0` stands for `stride_x_1` and so on."""
    return _NUMBER.sub("#", name)


def kinds_of(loaded: Loaded) -> dict[str, str]:
    """Return the names of a spec, in their order, with their kinds."""
    params = getattr(loaded.spec, "params", {})
    constants = {name for name, param in params.items() if param.value is not None}
    found = {loaded.spec.name: "name"}
    for section in SECTIONS:
        for name in getattr(loaded.spec, section, ()):
            found[name] = "constants" if name in constants else section
    return found


def named_apart(loaded: Loaded, more: frozenset[str] = frozenset()) -> Loaded:
    """Return the spec with names replaced that collide with names of the files or with `more`.

    Raises `KgenError` for a name that cannot be replaced: the name of the function, or a name that
    an argument would shadow. In a family without `names_give_way`, no name can be replaced.
    """
    own, yields = own_names(loaded.spec.kernel), family(loaded.spec.kernel).names_give_way
    passes = getattr(loaded.spec, "passes", ())
    function = own.function.union(*(own.of_passes.get(name, ()) for name in passes))
    taken: set[str] = set()
    other: dict[str, str] = {}
    wrong: list[str] = []
    for name, kind in kinds_of(loaded).items():
        of, inner = own.kinds[kind], name
        in_trees = own.trees if kind != "name" else frozenset[str]()
        while of.has(made := of.made(inner)) or made & taken or inner in more or inner in in_trees:
            inner += SUFFIX
        if inner != name and (kind == "name" or not yields or _called(loaded, name) in function):
            wrong.append(name)
        elif inner != name:
            other[name] = inner
        taken |= made
    if wrong:
        raise KgenError([refusal(loaded, _called(loaded, name)) for name in wrong])
    return inside(loaded, other) if other else loaded


def taken_from_values(loaded: Loaded) -> frozenset[str]:
    """Return the names that values in kernels must avoid: of the kernels, and the forms of the
    spec's names.
    """
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
    """Return the diagnostic for a name of a spec that the emitted files use."""
    from kgen.spec.source import Document

    document = Document(loaded.text, loaded.path.as_posix())
    message, hint = f"`{name}` is already a name in the emitted files", "choose another name"
    for section in SECTIONS:
        if name in document.data.get(section, ()):
            return document.key("name-taken", message, (section, name), hint)
    return document.value("name-taken", message, ("name",), hint)

"""`_launch.py`, the functions that the launchers of all specs call.

A single file contains their text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from kgen.targets.arguments import Derivatives, Numbers, Refused
from kgen.targets.template import Template, parts

FILENAME = "_launch.py"

MODULES = ("functools", "itertools", "numbers", "os", "threading")
"""The modules of the standard library that these functions import."""


@dataclass(frozen=True)
class Registry(Template):
    """The functions that register operators, under a namespace for each file."""

    template: ClassVar[str] = "_registry.j2"


@dataclass(frozen=True)
class LaunchFunctions(Template):
    """The functions, without imports."""

    template: ClassVar[str] = "_launching.j2"

    derivatives: Derivatives
    numbers: Numbers
    registry: Template = Registry()
    """The functions that register operators."""


@dataclass(frozen=True)
class LaunchFile(Template):
    """`_launch.py`."""

    template: ClassVar[str] = "_launch.j2"

    functions: LaunchFunctions
    modules: tuple[str, ...]


@dataclass(frozen=True)
class ImportsLaunch(Template):
    """The base of files that import the functions of `_launch.py` that their templates state."""

    import_indent: ClassVar[int] = 4
    """The columns before the import statement, which `try` encloses."""

    @property
    def launch_names(self) -> str:
        """The end of the import statement."""
        return imported(
            {name for part in parts(self) for name in part.launch_functions()}, self.import_indent
        )


_ALL_DERIVATIVES = Derivatives("", (Refused("", ""),), True, "", transformed=True)
_FUNCTIONS = LaunchFunctions(_ALL_DERIVATIVES, Numbers(there=True, integers=True))
LAUNCH_FILE = LaunchFile(_FUNCTIONS, MODULES)


def launch_file_with(registry: Template) -> LaunchFile:
    """Return `_launch.py` with other functions that register operators, without `itertools`."""
    modules = tuple(module for module in MODULES if module != "itertools")
    return LaunchFile(replace(_FUNCTIONS, registry=registry), modules)


def modules_of(launching: LaunchFunctions | None, *own: str) -> list[str]:
    """Return the modules that a file imports, with those of the functions if it contains them."""
    return sorted({*own, *(MODULES if launching is not None else ())})


def launching_of(single: bool) -> LaunchFunctions | None:
    """Return the functions for a single file; None for a file that imports them."""
    return _FUNCTIONS if single else None


def imported(names: Iterable[str], indent: int) -> str:
    """Return names as the end of an import statement, in lines of at most 120 columns.

    The statement is indented by `indent` columns.
    """
    listed, before = sorted(names), " " * (indent + 3)
    lines: list[str] = []
    line = before
    for name in listed:
        if len(line) + len(name) + 2 > 120:
            lines, line = [*lines, line], before
        line += f" {name},"
    flat = ", ".join(listed)
    return flat if len(flat) <= 90 else "(\n" + "\n".join([*lines, line]) + f"\n{' ' * indent})"

"""How each target spells expressions, what it can do, and how it compiles."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, cast

from kgen.diagnostics import Diagnostic, KgenError

if TYPE_CHECKING:
    from kgen.spec.load import Loaded


@dataclass(frozen=True)
class Source:
    """One file to emit: its name, the template that writes it, and the names that the template uses."""

    filename: str
    template: str
    context: dict[str, object]


TARGETS: dict[str, str] = {"triton": "kgen.targets.triton.sources"}
"""Target -> module, imported only when asked for, which offers `sources(loaded) -> list[Source]`."""


def asked_targets(loaded: Loaded) -> list[str]:
    """The targets that a spec asks for, in the order of the model."""
    return [name for name, options in loaded.spec.targets if options is not None]


def sources(loaded: Loaded, target: str) -> list[Source]:
    """The files that `target` emits for a spec."""
    module = TARGETS.get(target)
    if module is None:
        raise KgenError(
            Diagnostic(
                "unknown-target",
                f"there is no target `{target}`",
                file=str(loaded.path),
                hint=f"targets are: {', '.join(TARGETS)}",
            )
        )
    return cast("list[Source]", import_module(module).sources(loaded))

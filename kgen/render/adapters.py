"""Adapters of specs: what others call kernels by, in folders of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kgen.diagnostics import Diagnostic, KgenError
from kgen.family import family

if TYPE_CHECKING:
    from kgen.spec.load import Loaded


# Adapters are folders next to the kernels, not inside: each folder is a package with all that it
# needs, and can be copied. `adapters:` does not change the kernels, so their hashes and ledger
# records do not depend on it.
@dataclass(frozen=True)
class Adapter:
    """What an adapter of a spec is made of: files by folder, which kgen keeps, and by path those that are written where
    they are missing and the user's from then on."""

    folders: Mapping[str, Mapping[str, str]]
    started: Mapping[str, str] = field(default_factory=dict)
    specs: tuple[Loaded, ...] = ()
    """The specs whose kernels are in the folders."""
    fits: tuple[str, ...] = ()
    """The callers that the kernels fit: a line for each adapter that has some."""


def listed(variants: Sequence[Loaded]) -> tuple[str, ...]:
    """The adapters that a spec asks for."""
    return tuple(getattr(variants[0].spec, "adapters", ()))


def adapted(variants: Sequence[Loaded], kinds: Iterable[str]) -> Adapter:
    """Some adapters of a spec. Raises `KgenError` with all its diagnostics for those that it cannot have."""
    folders: dict[str, Mapping[str, str]] = {}
    started: dict[str, str] = {}
    specs: list[Loaded] = []
    fits: list[str] = []
    wrong: list[Diagnostic] = []
    for kind in kinds:
        try:
            made = _made(variants, kind)
        except KgenError as error:
            wrong += _where_it_is_listed(variants, kind, error.diagnostics)
            continue
        folders |= made.folders
        started |= made.started
        specs += made.specs
        fits += made.fits
    if wrong:
        raise KgenError(wrong)
    return Adapter(folders, started, tuple(specs), tuple(fits))


def _made(variants: Sequence[Loaded], kind: str) -> Adapter:
    kernel = variants[0].spec.kernel
    own = family(kernel).adapters
    if kind not in own:
        message = f"a spec of `{kernel}` has no adapter for {kind}"
        hint = f"it has: {', '.join(own)}" if own else "leave it out"
        raise KgenError(Diagnostic("no-adapter", message, variants[0].path.as_posix(), 1, 1, hint=hint))
    made: Adapter = own[kind](variants)
    return made


def _where_it_is_listed(
    variants: Sequence[Loaded], kind: str, said: Iterable[Diagnostic]
) -> Iterable[Diagnostic]:
    """What is wrong with an adapter, at the place where the spec asks for it, if it does: some of it is of specs that
    are made of the user's."""
    if kind not in (asked := listed(variants)):
        return said
    from kgen.spec.source import Document

    document = Document(variants[0].text, variants[0].path.as_posix())
    place = ("adapters", asked.index(kind))
    return [document.value(d.code, d.message, place, d.hint) for d in said]

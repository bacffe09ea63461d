"""How each target spells expressions, what it can do, and how it compiles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from kgen.diagnostics import Diagnostic, KgenError
from kgen.family import family, known_targets
from kgen.pages.markdown import said
from kgen.spec.too_large import too_large
from kgen.targets.launching import FILENAME, LAUNCH_FILE
from kgen.targets.template import Template

if TYPE_CHECKING:
    from kgen.spec.load import Loaded


@dataclass(frozen=True)
class Source:
    """One file to emit: its name, and the template that writes it.

    `arch` is the one architecture that the file is for, as sm_90a; None for a file that runs on several.
    `rank` says which file is the default where several can run: the highest, the fastest as measured. It is None for a
    file without the spec's function. `needs` is the package that it imports beside those of the target `triton`.
    `forward_only` is what the target says. `comment` is what begins a comment line. `alone` is the template where the
    file does without those beside it; None for one that cannot.
    """

    filename: str
    text: Template
    arch: str | None = None
    rank: int | None = None
    needs: str | None = None
    forward_only: bool = False
    comment: Literal["#", "//"] = "#"
    alone: Template | None = None
    remarks: tuple[str, ...] = ()
    """Sentences for the person who renders it, without the name of the spec."""
    offers: tuple[str, ...] = ()
    """What there is for users beside the spec's function."""
    signature: str = ""
    """Of the spec's function, in Python: its parameters."""
    docstring: Template | None = None
    """What the function's docstring says of arguments and results."""
    launches: bool = False
    """True if the file imports from `_launch.py`."""
    shared: bool = False
    """True if the file depends on no spec: the same for all of one license."""
    reserved: frozenset[str] = frozenset()
    """What the spec's function cannot be called. Of a file of Python that is found out."""


def launch_file() -> Source:
    """`_launch.py`, which is beside every file that imports from it."""
    return Source(FILENAME, LAUNCH_FILE, shared=True)


def callable_files(sources: Iterable[Source]) -> list[Source]:
    """Those that offer the spec's function, the default first."""
    return sorted((s for s in sources if s.rank is not None), key=lambda s: -(s.rank or 0))


def opening(spec: Any, *, in_comment: bool = False) -> str:
    """The sentence that docstrings of emitted files open with, or a comment: the summary, or what the spec is where it
    says nothing."""
    return _sentence(spec, spec.summary.in_comment() if in_comment else spec.summary.in_docstring())


def opening_in_markdown(spec: Any) -> str:
    """The same sentence as a paragraph of Markdown, in which no character is markup."""
    return said((_sentence(spec, spec.summary.on_terminal()),))


def _sentence(spec: Any, summary: str) -> str:
    words = summary.strip().rstrip(".") or f"The {spec.kernel.replace('_', ' ')} `{spec.name}`"
    return words if words.endswith(("?", "!")) else f"{words}."


def asked_targets(loaded: Loaded) -> list[str]:
    """The targets that a spec asks for, in the order of the model."""
    return [name for name, options in loaded.spec.targets if options is not None]


def sources(loaded: Loaded, target: str) -> list[Source]:
    """The files that `target` emits for a spec. Raises `KgenError` for a pair that there is not."""
    kernel, file = loaded.spec.kernel, str(loaded.path)
    own = family(kernel).targets
    if target in own:
        with too_large(loaded):
            return [
                replace(source, forward_only=own[target].forward_only)
                for source in own[target].sources(loaded)
            ]
    if target in known_targets():
        hint = f"targets of {kernel} are: {', '.join(own)}"
        message = f"the target `{target}` is not supported for {kernel}"
        raise KgenError(Diagnostic("unsupported-target", message, file=file, hint=hint))
    hint = f"targets are: {', '.join(known_targets())}"
    raise KgenError(Diagnostic("unknown-target", f"there is no target `{target}`", file=file, hint=hint))

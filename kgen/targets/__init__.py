"""The files that targets emit for a spec."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from kgen.diagnostics import Diagnostic, KgenError
from kgen.family import family, known_targets
from kgen.pages.markdown import said
from kgen.spec.too_large import too_large
from kgen.targets.launching import FILENAME, LAUNCH_FILE
from kgen.targets.signature import NO_PARAMETERS, Signature
from kgen.targets.template import Template

if TYPE_CHECKING:
    from kgen.spec.load import Loaded


@dataclass(frozen=True)
class Source:
    """One file to emit: its name, and the template that writes it.

    `arch` is the architecture of the file, such as sm_90a, or None if the file runs on several. Of
    the files that can run, the one with the highest `rank`, the fastest in measurements, is the
    default. Files without the function of the spec have no rank. `needs` is a package that the file
    imports in addition to the imports of the target `triton`.
    `forward_only` is a copy of the target's field. `comment` begins a comment line. `alone` is the
    template of the file if it is emitted without the others; None if it needs them.
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
    """Sentences that `kgen render` prints, without the name of the spec."""
    offers: tuple[str, ...] = ()
    """Public names of the file other than the function of the spec."""
    unbuilt: str = ""
    """The pass of the spec whose kernels `kgen build` cannot compile. Empty without one."""
    signature: Signature = NO_PARAMETERS
    """The parameters of the spec's function."""
    docstring: Template | None = None
    """The part of the function's docstring on arguments and results."""
    launches: bool = False
    """True if the file imports from `_launch.py`."""
    shared: bool = False
    """True if the file is the same for all specs with one license."""
    register_fake: str = "torch.library.register_fake({}, lib=_LIBRARY)"
    """The call that decorates the fake of an operator `{}`."""
    reserved: frozenset[str] = frozenset()
    """Names that the spec's function cannot have. For Python files, kgen finds them in the text."""


def launch_file() -> Source:
    """Return `_launch.py`, which is in every folder with a file that imports it."""
    return Source(FILENAME, LAUNCH_FILE, shared=True)


def callable_files(sources: Iterable[Source]) -> list[Source]:
    """Return the files that contain the spec's function, the default first."""
    return sorted((s for s in sources if s.rank is not None), key=lambda s: -(s.rank or 0))


def opening(spec: Any, *, in_comment: bool = False) -> str:
    """Return the first sentence of an emitted docstring or comment: the summary, or the kernel and
    name of the spec.
    """
    return _sentence(spec, spec.summary.in_comment() if in_comment else spec.summary.in_docstring())


def opening_in_markdown(spec: Any) -> str:
    """Return the same sentence in Markdown, with all markup escaped."""
    return said((_sentence(spec, spec.summary.on_terminal()),))


def _sentence(spec: Any, summary: str) -> str:
    words = summary.strip().rstrip(".") or f"The {spec.kernel.replace('_', ' ')} `{spec.name}`"
    return words if words.endswith(("?", "!")) else f"{words}."


def asked_targets(loaded: Loaded) -> list[str]:
    """Return the targets that a spec lists, in the order of the model."""
    return [name for name, options in loaded.spec.targets if options is not None]


def sources(loaded: Loaded, target: str) -> list[Source]:
    """Return the files that `target` emits for a spec.

    Raise `KgenError` if the target is unknown, or if the family does not have it.
    """
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
    raise KgenError(
        Diagnostic("unknown-target", f"there is no target `{target}`", file=file, hint=hint)
    )

"""`kgen render`: render specs, and show the files that change."""

from __future__ import annotations

import difflib
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from kgen.cli import terminal
from kgen.cli.options import GENERATED_FOLDER, Form, Prove, Specs, Targets, output_to
from kgen.cli.proofs import proven
from kgen.cli.terminal import Format
from kgen.cli.verbs import verb
from kgen.diagnostics import EXIT_WRONG, Diagnostic, KgenError, counted, escaped
from kgen.settings import settings

if TYPE_CHECKING:
    from kgen.render.writer import Change

Single = Annotated[
    bool,
    typer.Option(
        "--single", help="Write one self-contained file NAME.py per spec instead of a folder."
    ),
]


@verb("render")
def render(
    specs: Specs = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 if any file differs.")
    ] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Write nothing; show the changes as a patch.")
    ] = False,
    single: Single = False,
    stdout: Annotated[
        bool,
        typer.Option("--stdout", help="Print the self-contained file, and write nothing."),
    ] = False,
    target: Targets = None,
    output: Annotated[Optional[Path], output_to(GENERATED_FOLDER)] = None,  # noqa: UP045
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite or delete files that were edited by hand.")
    ] = False,
    prove: Prove = True,
    form: Form = Format.TEXT,
) -> int:
    """Write (render) the kernels of specs.

    With SPEC, kgen does not write the kernels of other specs. With or without SPEC, kgen deletes
    kernels whose spec file was deleted. With `--single`, kgen deletes nothing.
    """
    from kgen.render import checking, project, writer

    output = output or settings().generated
    if stdout and (check or diff):
        message = "`--stdout` cannot be combined with `--check` or `--diff`"
        raise KgenError(Diagnostic("usage", message, hint="leave out `--stdout`"))
    dry = check or diff
    single, target = single or stdout, target or None
    if dry:
        rendered = checking.render_checked(specs or [], output, targets=target, single=single)
    else:
        paths = project.find_specs(specs or [])
        rendered = project.render_all(paths, output, targets=target, single=single, cached=True)
        rendered = proven(rendered, target, output, prove=prove, keep=not stdout)
    outputs, started = project.together(rendered)
    if stdout:
        return _render_to_stdout(
            {name: text for o in outputs for name, text in o.files.items()}, form
        )

    if single:
        changes = writer.compute_single_changes(outputs, output)
    else:
        changes = writer.compute_changes(outputs, output, started)
    if not dry:
        writer.apply(changes, force=force)
        if prove:
            project.remember(rendered, output)
    shown = _Rendered(changes, writer.wanted(changes), check=check, diff=diff, force=force)
    remarks = project.remarks(rendered, output, (change.path for change in shown.drift))
    remarks += writer.hidden(changes) if single else []
    return _show_rendered(shown, remarks, form)


@dataclass(frozen=True)
class _Rendered:
    """The changes of a run of `kgen render`, and its options."""

    changes: Sequence[Change]
    total: int
    """Number of files that the specs make."""
    check: bool
    diff: bool
    force: bool

    @property
    def dry(self) -> bool:
        """True if nothing was written."""
        return self.check or self.diff

    @property
    def drift(self) -> list[Change]:
        """The files on disk that differ from the rendered ones."""
        from kgen.render import writer

        return writer.drift(self.changes)

    def last(self) -> str:
        """Return the last line: the number of files in each state."""
        forced = self.force and not self.dry
        # A manifest is listed, and counted, only if nothing else in its folder differs.
        listed = [one for one in self.drift if one.is_manifest]
        ours = [*(one for one in self.changes if not one.is_manifest), *listed]
        states = Counter(_effect(one, forced=forced) for one in ours)
        differ = states["new"] + states["changed"]
        if self.dry:
            left = f"{states['pruned']} orphaned, {states['edited']} edited"
            return f"{counted(self.total, 'file')} checked, {differ} differ, {left}"
        return (
            f"{counted(self.total, 'file')} rendered, {differ} changed, {states['pruned']} deleted"
        )


def _show_rendered(shown: _Rendered, remarks: Sequence[str], form: Format) -> int:
    patch = "".join(map(_diff, shown.drift)) if shown.diff else ""
    if form is Format.JSON:
        rows = [
            {"path": c.path.as_posix(), "state": c.state, "why": c.why or None} for c in shown.drift
        ]
        found = {"rendered": shown.total, "changes": rows, "remarks": remarks}
        terminal.data(found | ({"diff": patch} if shown.diff else {}))
    else:
        terminal.exact(patch) if patch else None
        for change in shown.drift if shown.check or not shown.diff else []:
            terminal.line(
                drift_line(change, dry=shown.dry), sys.stderr if shown.check else sys.stdout
            )
        for remark in remarks:
            terminal.line(remark, sys.stderr if shown.dry else sys.stdout)
    terminal.summary(shown.last(), form, aside=shown.diff)
    return EXIT_WRONG if shown.dry and shown.drift else 0


def _render_to_stdout(files: dict[str, str], form: Format) -> int:
    """Print one file unchanged, or several with a comment line before each."""
    from kgen.render.header import comment

    if form is Format.JSON:
        terminal.data({"files": files})
    else:
        for name, text in files.items():
            terminal.exact((f"{comment(text)} ---- {name}\n" if len(files) > 1 else "") + text)
    terminal.summary(f"{counted(len(files), 'file')} rendered", form, aside=True)
    return 0


def _effect(change: Change, *, forced: bool) -> str:
    """Return the state that a change counts as: `changed` or `pruned` for an overwritten edit."""
    if change.state == "edited" and forced:
        return "changed" if change.text is not None else "pruned"
    return change.state


def drift_line(change: Change, *, dry: bool) -> str:
    """Return a line with the state of a file, its path and the reason."""
    state = ("orphaned" if dry else "deleted") if change.state == "pruned" else change.state
    return escaped(
        f"{state}: {change.path.as_posix()}" + (f" ({change.why})" if change.why else "")
    )


def _diff(change: Change) -> str:
    """Return the change of one file as a unified diff."""
    name = change.path.as_posix().lstrip("/")
    old, new = (change.old or b"").decode("utf-8", "replace"), change.text or ""
    return "".join(
        difflib.unified_diff(
            old.splitlines(keepends=True),
            new.splitlines(keepends=True),
            "/dev/null" if change.old is None else f"a/{name}",
            "/dev/null" if change.text is None else f"b/{name}",
        )
    )

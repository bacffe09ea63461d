"""A new spec: a family's commented one, or a copy of another, under a name of its own."""

from __future__ import annotations

from pathlib import Path

from pydantic_core import PydanticCustomError

from kgen import files
from kgen.diagnostics import Diagnostic, KgenError
from kgen.family import KERNELS
from kgen.spec import schema
from kgen.spec.common import checked_name
from kgen.spec.load import load_variants
from kgen.spec.source import Document

SCHEMA = "kgen.schema.json"
LINE = "# yaml-language-server: $schema="
PLACEHOLDER = "starter"
"""What the families' commented specs are called."""


def starter(kernel: str, name: str) -> str:
    """The commented spec of a family, under a name."""
    text = (KERNELS / kernel / "starter.yaml").read_text(encoding="utf-8")
    return _with_schema(text.replace(PLACEHOLDER, _free(name)))


def copied(spec: Path, name: str) -> str:
    """The text of a spec, comments and all, under another name. Raises `KgenError`, also for a spec that is wrong."""
    document = Document(load_variants(spec)[0].text, spec.as_posix())
    there = document.value("", "", ("name",))
    assert there.line is not None
    assert there.column is not None
    lines, start = document.lines, there.column - 1
    line = lines[there.line - 1]
    lines[there.line - 1] = line[:start] + _free(name) + line[start + there.length :]
    return _with_schema("\n".join(lines))


def schema_beside(folder: Path) -> Path | None:
    """Where a folder of specs wants the schema that editors read; None where it has it, or a file of another's."""
    path = folder / SCHEMA
    try:
        there = files.read(path).decode(errors="replace")
    except FileNotFoundError:
        return path
    except OSError as error:
        message = f"cannot read the file: {error.strerror or error}"
        raise KgenError(
            Diagnostic("cannot-read", message, path.as_posix(), 1, 1, hint="move it away")
        ) from None
    return path if schema.is_ours(there) and there != schema.shipped() else None


def _with_schema(text: str) -> str:
    """The text with the line by which editors find the schema, in place of any that it has."""
    lines = [line for line in text.split("\n") if not line.startswith(LINE)]
    return "\n".join([LINE + SCHEMA, *lines])


def _free(name: str) -> str:
    try:
        return checked_name(name)
    except PydanticCustomError as error:
        said = error.context or {}
        raise KgenError(Diagnostic(said["code"], said["message"], "NAME", 1, 1, hint=said["hint"])) from None

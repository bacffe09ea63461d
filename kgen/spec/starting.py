"""Create a spec from the commented starter of a family, or from another spec."""

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
"""The name in the commented starters."""


def starter(kernel: str, name: str) -> str:
    """Return the commented starter of a family, with this name."""
    text = (KERNELS / kernel / "starter.yaml").read_text(encoding="utf-8")
    return _with_schema(text.replace(PLACEHOLDER, _free(name)))


def copied(spec: Path, name: str) -> str:
    """Return the text of a spec, with its comments, under another name. Raises `KgenError` if the
    spec is invalid.
    """
    document = Document(load_variants(spec)[0].text, spec.as_posix())
    there = document.value("", "", ("name",))
    assert there.line is not None
    assert there.column is not None
    lines, start = document.lines, there.column - 1
    line = lines[there.line - 1]
    lines[there.line - 1] = line[:start] + _free(name) + line[start + there.length :]
    return _with_schema("\n".join(lines))


def schema_beside(folder: Path) -> Path | None:
    """Return the path to which the schema must be written; None if it is there, or if the file is
    not kgen's.
    """
    path = folder / SCHEMA
    try:
        there = files.read(path).decode(errors="replace")
    except FileNotFoundError:
        return path
    except OSError as error:
        message = f"cannot read the file: {error.strerror or error}"
        raise KgenError(
            Diagnostic("cannot-read", message, path.as_posix(), 1, 1, hint="move the file away")
        ) from None
    return path if schema.is_ours(there) and there != schema.shipped() else None


def _with_schema(text: str) -> str:
    """Return the text with one line at the top from which editors find the schema."""
    lines = [line for line in text.split("\n") if not line.startswith(LINE)]
    return "\n".join([LINE + SCHEMA, *lines])


def _free(name: str) -> str:
    try:
        return checked_name(name)
    except PydanticCustomError as error:
        said = error.context or {}
        raise KgenError(
            Diagnostic(said["code"], said["message"], "NAME", 1, 1, hint=said["hint"])
        ) from None

"""Settings of a project in its `pyproject.toml`:

    [tool.kgen]
    specs = "kernels/specs"
    generated = "kernels/generated"

kgen searches from the working directory upwards and takes the first file with this table. Folders
are relative to the file.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kgen import files
from kgen.diagnostics import Diagnostic, KgenError, did_you_mean, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "pyproject.toml"
MAX_BYTES = 1_000_000


@dataclass(frozen=True)
class Settings:
    """Folders of the specs and the rendered kernels, relative to the working directory."""

    specs: Path = Path("specs")
    generated: Path = Path("generated")


NAMES = tuple(field.name for field in fields(Settings))


def settings(start: Path = Path()) -> Settings:
    """Return the settings of the project that contains `start`.

    Raise `KgenError` for a wrong file.
    """
    for folder in (inside := Path(os.path.abspath(start)), *inside.parents):
        path = Path(os.path.relpath(folder / FILE, inside))
        try:
            content = files.read(start / path, MAX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            message = f"cannot read the file: {error.strerror or error}"
            raise KgenError(
                Diagnostic(
                    "bad-settings",
                    message,
                    str(path),
                    1,
                    1,
                    hint="check the file and its permissions",
                )
            ) from None
        if (table := _table(content, path)) is not None:
            return table
    return Settings()


def _table(content: bytes, path: Path) -> Settings | None:
    """Return the settings in the file, or None if it has no `tool.kgen`."""
    if len(content) > MAX_BYTES:
        message = f"expected at most {MAX_BYTES} bytes, got more"
        raise KgenError(Diagnostic("bad-settings", message, str(path), 1, 1, hint="shorten it"))
    lines = (text := _text(content, path)).split("\n")
    tool = _parsed(text, path).get("tool")
    table = tool.get("kgen") if isinstance(tool, dict) else None
    if table is None:
        return None

    def wrong(key: str, message: str, hint: str) -> Diagnostic:
        line = _line(lines, key)
        source = lines[line]
        column = max(source.find(key), 0)
        where = (str(path), line + 1, column + 1, len(key), source)
        return Diagnostic("bad-settings", message, *where, hint=hint)

    if not isinstance(table, dict):
        raise KgenError(
            wrong(
                "kgen",
                "`tool.kgen`: expected a table",
                'write `[tool.kgen]`, then `specs = "specs"`',
            )
        )
    found = []
    for key, value in table.items():
        if key not in NAMES:
            hint = (
                did_you_mean(key, NAMES)
                or f"the settings are {' and '.join(f'`{name}`' for name in NAMES)}"
            )
            found.append(wrong(key, f"`tool.kgen` has no setting {shown(key)}", hint))
        elif not isinstance(value, str) or not value or "\0" in value:
            hint = f'write the name of a folder, such as `{key} = "{key}"`'
            found.append(
                wrong(key, f"`{key}`: expected the name of a folder, got {shown(value)}", hint)
            )
    if found:
        raise KgenError(found)
    folders = {name: table.get(name, getattr(Settings, name)) for name in NAMES}
    return Settings(
        **{name: Path(os.path.normpath(path.parent / folder)) for name, folder in folders.items()}
    )


def _text(content: bytes, path: Path) -> str:
    try:
        return content.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        message = f"byte 0x{content[error.start]:02x} is not UTF-8"
        place = files.position(content, error.start)
        raise KgenError(
            Diagnostic("bad-settings", message, str(path), *place, hint="save it as UTF-8")
        ) from None


def _parsed(text: str, path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = tomllib.loads(text)
        return found
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        line, column = _where(text, error)
        source = text.split("\n")[line - 1]
        message = f"this is not TOML: {str(error).partition(' (at ')[0]}"
        where = (str(path), line, column, 1, source)
        raise KgenError(
            Diagnostic("bad-settings", message, *where, hint="correct the syntax")
        ) from None


def _where(text: str, error: Exception) -> tuple[int, int]:
    """Return the line and column, from 1, at the end of a message of the TOML reader."""
    said = str(error).rpartition("(at line ")[2].rstrip(")").split(", column ")
    if len(said) == 2 and all(number.isdigit() for number in said):
        return int(said[0]), int(said[1])
    end = text.rstrip("\n")
    return end.count("\n") + 1, len(end.rpartition("\n")[2]) + 1


def _line(lines: list[str], key: str) -> int:
    """Return the line, from 0, of a key, else of its table."""
    table = next((i for i, line in enumerate(lines) if "kgen" in line.partition("#")[0]), 0)
    own = (i for i, line in enumerate(lines) if i >= table and key in line.partition("=")[0])
    return next(own, table)

"""Safe reading of untrusted files: at most a limit of bytes, and never from a file that blocks."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kgen.diagnostics import Diagnostic, KgenError, shortened, shown

if TYPE_CHECKING:
    from pydantic import BaseModel

MAX_RECORD = 64_000_000
"""Maximum bytes of a record of kgen or of an emitted file. Real files have less than one
million.
"""
MAX_DEPTH = 64
ABANDONED = 600
"""Age in seconds of a temporary file that no process still writes."""
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<process>\d+)-[0-9a-f]{8}\.tmp", re.DOTALL)


class NotJsonError(KgenError):
    """A file is not JSON, or its JSON has the wrong structure."""


def read(path: Path, limit: int = MAX_RECORD) -> bytes:
    """Return at most `limit` + 1 bytes.

    Raise `OSError`, also for a pipe or device, which could block.
    """
    # `opener` instead of a descriptor, so that errors have the path and not its number
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read(limit + 1)


def read_json(path: Path, code: str, hint: str) -> Any:
    """Return a JSON record of kgen.

    Raise `OSError`, `NotJsonError`, or `KgenError` for hostile content.
    """

    def wrong(message: str, line: int = 1, column: int = 1) -> Diagnostic:
        return Diagnostic(code, message, str(path), line, column, hint=hint)

    content = read(path)
    if len(content) > MAX_RECORD:
        raise KgenError(wrong(f"expected at most {MAX_RECORD} bytes, got more"))
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        place = position(content, error.start)
        raise NotJsonError(
            wrong(f"byte 0x{content[error.start]:02x} is not UTF-8", *place)
        ) from None
    if (deep := _too_deep(text)) is not None:
        place = position(text.encode(), len(text[:deep].encode()))
        raise KgenError(wrong(f"the file nests more than {MAX_DEPTH} levels deep", *place))
    try:
        return json.loads(text, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise NotJsonError(
            wrong(f"this is not JSON: {error.msg}", error.lineno, error.colno)
        ) from None
    except ValueError as error:  # such as a number with thousands of digits
        raise NotJsonError(wrong(f"this is not JSON: {error}")) from None


def read_as(model: type[BaseModel], path: Path, code: str, hint: str) -> Any:
    """Return a JSON record of kgen that `model` validates.

    Raise `NotJsonError` if it does not, and as `read_json`.
    """
    from pydantic import ValidationError

    said = read_json(path, code, hint)
    try:
        model.model_validate(said)
    except ValidationError as error:
        first = error.errors()[0]
        where = " of ".join(shown(step) for step in reversed(first["loc"]))
        message = f"{where}: {first['msg']}" if where else first["msg"]
        raise NotJsonError(Diagnostic(code, message, str(path), 1, 1, hint=hint)) from None
    return said


def position(content: bytes, index: int) -> tuple[int, int]:
    """Return the line and column, from 1, of a byte in UTF-8 text."""
    line = content.count(b"\n", 0, index) + 1
    return line, len(
        content[content.rfind(b"\n", 0, index) + 1 : index].decode(errors="replace")
    ) + 1


def write_new(path: Path, text: str, hint: str, *, force: bool = False) -> None:
    """Write a file and its parent folders. If this fails, the path stays as it was.

    Raise `KgenError` with `hint` if it exists, unless `force` is set.
    """
    if not force and os.path.lexists(path):
        raise KgenError(Diagnostic("exists", "the file exists", path.as_posix(), 1, 1, hint=hint))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() or not os.path.lexists(path):
            _replace(path.resolve(), text.encode())
        else:  # a device or a pipe, such as /dev/stdout
            path.write_bytes(text.encode())
    except OSError as error:
        message = f"cannot write the file: {error.strerror or error}"
        raise KgenError(
            Diagnostic(
                "cannot-write",
                message,
                path.as_posix(),
                1,
                1,
                hint="check the folder and its permissions",
            )
        ) from None


def _replace(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, and move it. A file that exists keeps its mode."""
    sweep(path.parent, {path.name})
    beside = temporary(path)
    try:
        beside.write_bytes(content)
        if path.exists():
            shutil.copymode(path, beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def temporary(path: Path) -> Path:
    """Return the path of a temporary file next to `path`. Its name has the number of this
    process.
    """
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def sweep(folder: Path, names: Collection[str] | None = None) -> None:
    """Delete the temporary files of killed processes in a folder, for `names` or for all names.

    Another machine may write to the same folder, and its processes look dead here. It then reports
    a missing file, and a second run succeeds.
    """
    with suppress(OSError):
        for path in folder.iterdir():
            found = _TEMPORARY.fullmatch(path.name)
            if found and (names is None or found["name"] in names):
                old = time.time() - path.lstat().st_mtime > ABANDONED
                if old or not _runs(int(found["process"])):
                    path.unlink(missing_ok=True)


def _runs(process: int) -> bool:
    """True if a process with this number exists."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def checked_path(path: Path) -> Path:
    """Return `path`. Raise `KgenError` if it is not UTF-8 or too long for the system."""
    try:
        str(path).encode()
        os.stat(path)
    except UnicodeEncodeError:
        raise KgenError(_bad_path("the path is not UTF-8", str(path), "rename it")) from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            hint = "shorten the path, or change to a folder closer to the file"
            message = f"the path is longer than the system allows ({len(str(path))} characters)"
            raise KgenError(_bad_path(message, shortened(str(path)), hint)) from None
    return path


def _bad_path(message: str, path: str, hint: str) -> Diagnostic:
    return Diagnostic("bad-path", message, path, 1, 1, hint=hint)


def _no_number(name: str) -> NoReturn:
    """Reject NaN and infinities, which Python reads and JSON does not have."""
    raise ValueError(f"{name} is not a JSON number")


def _too_deep(text: str) -> int | None:
    """Return the index where JSON nests deeper than `MAX_DEPTH`, because Python's reader would
    overflow its stack.
    """
    depth = 0
    for found in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', text, re.DOTALL):
        depth += (found[0] in "[{") - (found[0] in "]}")
        if depth > MAX_DEPTH:
            return found.start()
    return None

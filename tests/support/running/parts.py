"""What a part of a run found (`--shard 1/4`), in a file of its own until the parts are put together (`--merge`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from kgen.diagnostics import Diagnostic, KgenError
from kgen.files import read_json

JOBS = os.cpu_count() or 1
Jobs = Annotated[int, typer.Option(min=1, help="Processes at a time.")]
Output = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("-o", "--output", help="Where a part is kept. Default: SCRIPT-I-of-N.json."),
]
Merge = Annotated[
    Optional[list[Path]],  # noqa: UP045
    typer.Option(metavar="FILE", help="Try nothing, and enter what these parts found. Repeatable."),
]
"""The options of scripts whose work has parts."""
HINT = "name what the same script wrote with `--shard`"


def write(path: Path, of: str, results: Mapping[str, Any]) -> None:
    """The results of a part by key; `of` names what they are of, and what they depend on."""
    path.write_text(
        json.dumps({"of": of, "results": results}, indent=1, sort_keys=True) + "\n", encoding="utf-8"
    )


def merged(paths: Sequence[Path], of: str, is_result: Callable[[str, Any], bool]) -> dict[str, Any]:
    """The results of some parts, in whatever order they are named; of two for one key the one whose text is greater.
    `is_result` is asked about each with its key.

    Raises `KgenError` for a file that is none, or of something else.
    """
    found: dict[str, Any] = {}
    for path in paths:

        def wrong(why: str, path: Path = path) -> KgenError:
            return KgenError(Diagnostic("bad-part", f"cannot merge the part: {why}", str(path), hint=HINT))

        try:
            part = read_json(path, "bad-part", HINT)
        except OSError as error:
            raise wrong(error.strerror or str(error)) from None
        results = part.get("results") if isinstance(part, dict) else None
        if not isinstance(results, dict) or not all(is_result(*one) for one in results.items()):
            raise wrong("it has no results")
        if part.get("of") != of:
            raise wrong(f"it is of {part.get('of')}, and here is {of}")
        for key, result in results.items():
            found[key] = max(result, found.get(key, result), key=lambda one: json.dumps(one, sort_keys=True))
    return found

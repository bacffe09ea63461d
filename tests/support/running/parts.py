"""Results of a part of a run (`--shard 1/4`), in a file until `--merge` combines the parts."""

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
Jobs = Annotated[int, typer.Option(min=1, help="Number of worker processes.")]
Output = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("-o", "--output", help="Output file of a part. Default: SCRIPT-I-of-N.json."),
]
Merge = Annotated[
    Optional[list[Path]],  # noqa: UP045
    typer.Option(metavar="FILE", help="Run nothing; merge the results of these parts. Repeatable."),
]
"""Options of scripts that split their work into parts."""
HINT = "name what the same script wrote with `--shard`"


def write(path: Path, of: str, results: Mapping[str, Any]) -> None:
    """Write the results of a part by key.

    `of` names the run, with everything that the results depend on.
    """
    path.write_text(
        json.dumps({"of": of, "results": results}, indent=1, sort_keys=True) + "\n",
        encoding="utf-8",
    )


def merged(paths: Sequence[Path], of: str, is_result: Callable[[str, Any], bool]) -> dict[str, Any]:
    """Return the results of all parts, independent of their order. Of two results for one key, take
    the greater text.

    `is_result` checks each key with its result. Raise `KgenError` for a file of another kind or of
    another run.
    """
    found: dict[str, Any] = {}
    for path in paths:

        def wrong(why: str, path: Path = path) -> KgenError:
            return KgenError(
                Diagnostic("bad-part", f"cannot merge the part: {why}", str(path), hint=HINT)
            )

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
            found[key] = max(
                result, found.get(key, result), key=lambda one: json.dumps(one, sort_keys=True)
            )
    return found

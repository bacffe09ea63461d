"""The job of a worker that compiles an emitted file for a package."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kgen.verify.compiling import CompileJob


@dataclass(frozen=True)
class BuildJob:
    """The file that one worker compiles, and the folder for its machine code.

    `sizes` has the values of the sizes that a spec leaves open, by the names that `compile_calls`
    takes.
    """

    job: CompileJob
    sizes: Mapping[str, Sequence[int]]
    folder: Path

    def keep(self, kernel: str, code: bytes, suffix: str = ".cubin") -> dict[str, Any]:
        """Write machine code to the folder, and return its entry in the manifest: file, sha256 and
        bytes.
        """
        digest = hashlib.sha256(code).hexdigest()
        file = f"cubins/{kernel.strip('_')}-{digest[:16]}{suffix}"
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(code)
        return {"file": file, "sha256": digest, "bytes": len(code)}

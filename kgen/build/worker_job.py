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
    """What one worker compiles, and where to. `sizes` are those of what the spec leaves open, as of `compile_calls`."""

    job: CompileJob
    sizes: Mapping[str, Sequence[int]]
    folder: Path

    def keep(self, kernel: str, code: bytes, suffix: str = ".cubin") -> dict[str, Any]:
        """Write machine code to the folder; what a manifest says of the file."""
        digest = hashlib.sha256(code).hexdigest()
        file = f"cubins/{kernel.strip('_')}-{digest[:16]}{suffix}"
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(code)
        return {"file": file, "sha256": digest, "bytes": len(code)}

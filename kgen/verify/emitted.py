"""The emitted files of a spec that can be called, and where they can be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError
from kgen.targets import asked_targets, sources


@dataclass(frozen=True)
class Emitted:
    """A Python file of a target; what lies beside it under the same stem (`cuda.cu`) belongs to it."""

    spec: str
    target: str
    path: Path

    @property
    def stem(self) -> str:
        """What tells it from the spec's other files: `triton`, `cuda`, `cute_sm90`."""
        return self.path.stem

    def unable(self, device: str) -> str | None:
        """Why it cannot run on `cuda` or `cpu`; None where it can."""
        if device == "cpu" and self.target != "triton":
            return "needs a GPU"
        return None


def emitted_files(generated: Path, loaded: Any) -> list[Emitted]:
    """Every file of a spec that can be called, whether it was rendered or not."""
    name = loaded.spec.name
    return [
        Emitted(name, target, Path(generated) / name / source.filename)
        for target in asked_targets(loaded)
        for source in sources(loaded, target)
        if source.filename.endswith(".py")
    ]


def require_emitted(generated: Path, loaded: Any) -> list[Emitted]:
    """The same. Raises `KgenError` where one was not rendered."""
    files = emitted_files(generated, loaded)
    if missing := [file.path for file in files if not file.path.is_file()]:
        raise KgenError(
            Diagnostic(
                "not-rendered",
                f"`{missing[0]}` does not exist: spec `{loaded.spec.name}` is not rendered",
                file=str(loaded.path),
                hint=f"kgen render {loaded.path}",
            )
        )
    return files

"""The emitted files of a spec that can be called, and where they can run."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError
from kgen.family import Chip, Runtime, chips, family
from kgen.targets import asked_targets, sources
from kgen.targets.launching import FILENAME as LAUNCH
from kgen.verify.families import chips_of

PORTABLE = "triton.py"
"""The Triton file. The kernels for one chip belong to it, although their stems differ."""


def parts(path: Path) -> list[Path]:
    """Return an emitted file and its parts: files of the same stem (`cuda.cu`), and files that it
    imports.
    """
    path = Path(path)
    stem = sorted(p for p in path.parent.glob(f"{path.stem}.*") if p != path)
    names = [*(chip.file for chip in chips() if path.name == PORTABLE), LAUNCH]
    others = [path.with_name(name) for name in names]
    return [path, *(p for p in (*stem, *others) if p.is_file())]


@dataclass(frozen=True)
class Emitted:
    """A callable Python file of a target. `parts` lists the files that belong to it."""

    spec: str
    target: str
    path: Path
    runtime: Runtime
    arch: str | None = None
    """The only architecture that it supports, for example sm_90a. None for any."""
    rank: int | None = None
    """Priority if several files can run; the highest is called. None for a file without the spec's
    function.
    """
    forward_only: bool = False
    part: str | None = None
    """The part of the spec's kernel in this file. None for all of it."""

    @property
    def stem(self) -> str:
        """Name that distinguishes the file from others of the spec: `triton`, `cuda`,
        `cute_sm90`.
        """
        return self.path.stem

    def chips(self, problem: Any) -> tuple[Chip, ...]:
        """The chips whose kernels are in a file next to this one."""
        if self.path.name != PORTABLE:
            return ()
        found = chips_of(problem)
        return tuple(chip for chip in found if self.path.with_name(chip.file).is_file())

    def unable(self, device: str) -> str | None:
        """Reason why it cannot run on `cuda` or `cpu`; None if it can."""
        if device == "cpu" and not self.runtime.on_cpu:
            return "needs a GPU"
        if self.arch is not None and self.arch != (here := _arch_here()):
            return f"is for {self.arch}, and this device is {here}"
        if package := self.missing_package():
            return f"needs `{package}`"
        return None

    def missing_package(self) -> str | None:
        """The package of its target, if it is not installed."""
        package = self.runtime.needs
        return package if package and importlib.util.find_spec(package) is None else None


def _arch_here() -> str:
    torch: Any = importlib.import_module("torch")
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}a"


def emitted_files(generated: Path, loaded: Any) -> list[Emitted]:
    """Return every callable file of a spec, rendered or not."""
    name, own = loaded.folder, family(loaded.spec.kernel).targets
    belonging = {chip.file for chip in chips()}
    return [
        Emitted(
            name,
            target,
            Path(generated) / name / source.filename,
            own[target].runtime,
            source.arch,
            source.rank,
            source.forward_only,
            own[target].part,
        )
        for target in asked_targets(loaded)
        for source in sources(loaded, target)
        if source.filename.endswith(".py") and source.filename not in belonging
    ]


def require_emitted(generated: Path, loaded: Any) -> list[Emitted]:
    """Return every callable file of a spec. Raises `KgenError` if one is not rendered."""
    files = emitted_files(generated, loaded)
    if missing := [file.path for file in files if not file.path.is_file()]:
        raise KgenError(
            Diagnostic(
                "not-rendered",
                f"`{missing[0]}` does not exist: spec `{loaded.folder}` is not rendered",
                file=str(loaded.path),
                hint=f"kgen render {loaded.path}",
            )
        )
    return files

"""The emitted files of a spec that can be called, and where they can be."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError
from kgen.family import Chip, Runtime, chips, family
from kgen.targets import asked_targets, sources
from kgen.targets.launching import FILENAME as LAUNCH
from kgen.verify.families import chip_of

PORTABLE = "triton.py"
"""The file that others lie beside: the launch functions, and kernels for one chip. They belong to it, though they have
other stems."""


def parts(path: Path) -> list[Path]:
    """An emitted file, and what belongs to it: files of its stem (`cuda.cu`), and those that it imports."""
    path = Path(path)
    stem = sorted(p for p in path.parent.glob(f"{path.stem}.*") if p != path)
    names = [*(chip.file for chip in chips()), LAUNCH] if path.name == PORTABLE else []
    others = [path.with_name(name) for name in names]
    return [path, *(p for p in (*stem, *others) if p.is_file())]


@dataclass(frozen=True)
class Emitted:
    """A Python file of a target that can be called by itself; `parts` says what belongs to it."""

    spec: str
    target: str
    path: Path
    runtime: Runtime
    arch: str | None = None
    """The one architecture that it is for, as sm_90a."""
    rank: int | None = None
    """Which is called where several can run: the highest. None for a file without the spec's function."""
    forward_only: bool = False
    part: str | None = None
    """Which part of the spec's kernel the file does, where it does not do all of it."""

    @property
    def stem(self) -> str:
        """What tells it from the spec's other files: `triton`, `cuda`, `cute_sm90`."""
        return self.path.stem

    def chip(self, problem: Any) -> Chip | None:
        """The kernels for one chip in a file beside this one; None where that is not there."""
        chip = chip_of(problem)
        there = chip and self.path.name == PORTABLE and self.path.with_name(chip.file).is_file()
        return chip if there else None

    def unable(self, device: str) -> str | None:
        """Why it cannot run on `cuda` or `cpu`; None where it can."""
        if device == "cpu" and not self.runtime.on_cpu:
            return "needs a GPU"
        if self.arch is not None and self.arch != (here := _arch_here()):
            return f"is for {self.arch}, and this device is {here}"
        if package := self.missing_package():
            return f"needs `{package}`"
        return None

    def missing_package(self) -> str | None:
        """The package of its target, where that is not installed."""
        package = self.runtime.needs
        return package if package and importlib.util.find_spec(package) is None else None


def _arch_here() -> str:
    torch: Any = importlib.import_module("torch")
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}a"


def emitted_files(generated: Path, loaded: Any) -> list[Emitted]:
    """Every file of a spec that can be called, whether it was rendered or not."""
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
    """The same. Raises `KgenError` where one was not rendered."""
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

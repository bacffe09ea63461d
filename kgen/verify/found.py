"""The results of each file of a run of `kgen verify`: its rows, where it ran, and what is recorded of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kgen.family import Chip
from kgen.verify import ledger
from kgen.verify.emitted import Emitted
from kgen.verify.events import Ran
from kgen.verify.farm.tasks import Row
from kgen.verify.packages import manifest_of


class Interrupted(KeyboardInterrupt):
    """A run was interrupted. It has the rows so far, and how many cases are left."""

    def __init__(self, rows: Sequence[Row], left: int) -> None:
        super().__init__()
        self.rows, self.left = rows, left


@dataclass
class Found:
    """What came of one file: its rows, and where they are of; or why it could not run there."""

    emitted: Emitted
    cases: int = 0
    """How many there are."""
    chip: Chip | None = None
    """Of the kernels for one chip beside it, whose rows these names have:"""
    chip_names: Collection[str] = ()
    where: dict[str, Any] | None = None
    unable: str | None = None
    unused: str | None = None
    """Why calls here do not run the kernels for one chip."""

    def __post_init__(self) -> None:
        self.rows: list[Row] = []
        self.unbuilt: list[str] = []
        self.ended = 0

    @property
    def whole(self) -> bool:
        """True if every case has a row, or had one."""
        return self.ended == self.cases

    def add(self, rows: Sequence[Row]) -> None:
        """The rows of one of its tasks."""
        for row in rows:
            if "where" in row:
                self.where = row["where"]
            elif "unable" in row:
                self.unable = row["unable"]
            elif "unused" in row:
                self.unused = row["unused"]
            else:
                self.ended += 1
                self.rows.append(row)

    def leave_out_unbuilt(self) -> list[str]:
        """The cases that a package has no machine code for: they are neither right nor wrong."""
        rows = [row for row in self.rows if row.get("unbuilt")]
        self.rows = [row for row in self.rows if not row.get("unbuilt")]
        self.unbuilt = sorted({f"{row['pass']} {row['case']}" for row in rows})
        return self.unbuilt

    def leave_out_unrun(self) -> None:
        """The cases that launched none of the kernels for one chip; if no case did, these kernels did not run."""
        unrun = [row["unrun"] for row in self.rows if "unrun" in row]
        self.rows = [row for row in self.rows if "unrun" not in row]
        if unrun and not any(self._of_chip(row) for row in self.rows):
            self.unused = unrun[0]

    def ran(self) -> Iterable[Ran]:
        """Its cases, by file and by how they ran."""
        if self.where is None:
            return
        own = sum(not self._of_chip(row) for row in self.rows)
        device = self.where["device"]
        on_cpu = "in Triton's interpreter" if "triton" in self.emitted.runtime.tools else "on the CPU"
        how = on_cpu if device == ledger.INTERPRETER else f"on {device}"
        yield Ran(self.emitted.path.name, own, f"cases {how}")
        if self.chip and (small := len(self.rows) - own):
            yield Ran(self.chip.file, small, f"small cases in {self.chip.interpreter}")

    def not_run(self) -> Emitted | None:
        """What stands for the file of the kernels for one chip, where these did not run."""
        if self.chip is None or self.unused is None:
            return None
        return replace(self.emitted, path=self.emitted.path.with_name(self.chip.file))

    def record(self, generated: Path, digest: str, built: Path | None, *, quick: bool) -> bool:
        """Enter its rows in the ledger, which takes a failure back; true if all are right. Where not all cases ran,
        only a failure counts."""
        wrong = any(not row["ok"] for row in self.rows)
        if self.where is None or not (self.whole or wrong):
            return False
        path, where = self.emitted.path, ledger.Where(**self.where)
        if built is None:
            ledger.record(generated, path, digest, self.rows, where, quick=quick)
        # If a package has no machine code for the device, no case has run, and there is nothing to take back.
        for code in () if built is None else _code_for(built, self):
            ledger.record_package(generated, path, digest, self.rows, where, code, quick=quick)
        return bool(self.rows) and all(row["ok"] for row in self.rows)

    def _of_chip(self, row: Row) -> bool:
        return row["case"] in self.chip_names


def all_that_ran(files: Iterable[Found]) -> tuple[Ran, ...]:
    """The same of several files, those of one name together."""
    counts: Counter[tuple[str, str]] = Counter()
    for one in (ran for file in files for ran in file.ran()):
        counts[one.file, one.how] += one.cases
    return tuple(Ran(file, cases, how) for (file, how), cases in counts.items() if cases)


def archs_built(built: Path, found: Found) -> list[str]:
    """The architectures of the machine code that a package has of a file for where it ran."""
    assert found.where is not None
    file, chip = found.emitted, found.where["capability"].replace(".", "")
    rows = manifest_of(built, file.spec)["kernels"]
    return sorted(
        {row["arch"] for row in rows if (row["target"], str(row["capability"])) == (file.target, chip)}
    )


def _code_for(built: Path, found: Found) -> Iterator[ledger.PackageCode]:
    """The machine code that a package has of a file for where it ran, by architecture."""
    tools = found.emitted.runtime.tools
    made = manifest_of(built, found.emitted.spec)["compilers"]
    compilers = {tool: version for tool, version in made.items() if tool in tools}
    for arch in archs_built(built, found):
        yield ledger.PackageCode(arch, compilers, found.unbuilt)

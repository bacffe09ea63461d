"""The results of each file of a run of `kgen verify`: its rows, its device, and its record."""

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
    """Interrupted run, with its rows and the number of remaining cases."""

    def __init__(self, rows: Sequence[Row], left: int) -> None:
        super().__init__()
        self.rows, self.left = rows, left


@dataclass
class OfChip:
    """The kernels for one chip in a file next to the emitted one."""

    chip: Chip
    names: Collection[str]
    """Their cases."""
    unused: str | None = None
    """Reason why calls here do not run them."""

    def ran(self, row: Row) -> bool:
        """True if a row is of one of their cases."""
        return row["case"] in self.names


@dataclass
class Found:
    """The result of one file: its rows and their device, or the reason why it could not run."""

    emitted: Emitted
    cases: int = 0
    """Number of cases."""
    chips: tuple[OfChip, ...] = ()
    where: dict[str, Any] | None = None
    unable: str | None = None

    def __post_init__(self) -> None:
        self.rows: list[Row] = []
        self.unbuilt: list[str] = []
        self.ended = 0

    @property
    def whole(self) -> bool:
        """True if every case has ended."""
        return self.ended == self.cases

    def add(self, rows: Sequence[Row]) -> None:
        """Add the rows of one of its tasks."""
        for row in rows:
            if "where" in row:
                self.where = row["where"]
            elif "unable" in row:
                self.unable = row["unable"]
            elif "unused" in row:
                (of,) = (of for of in self.chips if of.chip.file == row["file"])
                of.unused = row["unused"]
            else:
                self.ended += 1
                self.rows.append(row)

    def leave_out_unbuilt(self) -> list[str]:
        """Remove the cases without machine code in the package, and return their names.

        They have no verdict.
        """
        rows = [row for row in self.rows if row.get("unbuilt")]
        self.rows = [row for row in self.rows if not row.get("unbuilt")]
        self.unbuilt = sorted({f"{row['pass']} {row['case']}" for row in rows})
        return self.unbuilt

    def leave_out_unrun(self) -> None:
        """Remove the cases that launched no kernel of their chip.

        If no case of a chip did, set its `unused`.
        """
        unrun = [row for row in self.rows if "unrun" in row]
        self.rows = [row for row in self.rows if "unrun" not in row]
        for of in self.chips:
            reasons = [row["unrun"] for row in filter(of.ran, unrun)]
            if reasons and not any(map(of.ran, self.rows)):
                of.unused = reasons[0]

    def ran(self) -> Iterable[Ran]:
        """Its cases by file and by device."""
        if self.where is None:
            return
        small = [sum(map(of.ran, self.rows)) for of in self.chips]
        device = self.where["device"]
        on_cpu = (
            "in Triton's interpreter" if "triton" in self.emitted.runtime.tools else "on the CPU"
        )
        how = on_cpu if device == ledger.INTERPRETER else f"on {device}"
        yield Ran(self.emitted.path.name, len(self.rows) - sum(small), f"cases {how}")
        for of, cases in zip(self.chips, small, strict=True):
            if cases:
                yield Ran(of.chip.file, cases, f"small cases in {of.chip.interpreter}")

    def not_run(self) -> Iterator[tuple[Emitted, str]]:
        """Yield the file of each chip whose kernels did not run, with the reason."""
        for of in self.chips:
            if of.unused is not None:
                yield (
                    replace(self.emitted, path=self.emitted.path.with_name(of.chip.file)),
                    of.unused,
                )

    def record(self, generated: Path, digest: str, built: Path | None, *, quick: bool) -> bool:
        """Enter its rows in the ledger; return True if all are right.

        A failure removes the record. If some cases did not run, only a failure is entered.
        """
        wrong = any(not row["ok"] for row in self.rows)
        if self.where is None or not (self.whole or wrong):
            return False
        path, where = self.emitted.path, ledger.Where(**self.where)
        if built is None:
            ledger.record(generated, path, digest, self.rows, where, quick=quick)
        # Without machine code for the device, no case has run, and there is no record to remove.
        for code in () if built is None else _code_for(built, self):
            ledger.record_package(generated, path, digest, self.rows, where, code, quick=quick)
        return bool(self.rows) and all(row["ok"] for row in self.rows)


def all_that_ran(files: Iterable[Found]) -> tuple[Ran, ...]:
    """Return the cases of several files, grouped by file name."""
    counts: Counter[tuple[str, str]] = Counter()
    for one in (ran for file in files for ran in file.ran()):
        counts[one.file, one.how] += one.cases
    return tuple(Ran(file, cases, how) for (file, how), cases in counts.items() if cases)


def archs_built(built: Path, found: Found) -> list[str]:
    """Return the architectures of a file's machine code in a package, for the device of the run."""
    assert found.where is not None
    file, chip = found.emitted, found.where["capability"].replace(".", "")
    rows = manifest_of(built, file.spec)["kernels"]
    return sorted(
        {
            row["arch"]
            for row in rows
            if (row["target"], str(row["capability"])) == (file.target, chip)
        }
    )


def _code_for(built: Path, found: Found) -> Iterator[ledger.PackageCode]:
    """Yield a file's machine code in a package for the device of the run, by architecture."""
    tools = found.emitted.runtime.tools
    made = manifest_of(built, found.emitted.spec)["compilers"]
    compilers = {tool: version for tool, version in made.items() if tool in tools}
    for arch in archs_built(built, found):
        yield ledger.PackageCode(arch, compilers, found.unbuilt)

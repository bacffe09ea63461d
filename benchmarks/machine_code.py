"""Tabulate the sizes of packages of machine code.

Usage: `python benchmarks/machine_code.py BUILT`.

BUILT is a folder of packages of `kgen build`. The manifests give the kernels per architecture,
their bytes, the largest number of registers, and the spills. Writes `benchmarks/machine_code.json`
and the table of `docs/performance/machine-code.md`. Results of other packages are kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/performance/machine-code.md"
MARK = "<!-- sizes -->\n"


def rows(built: Path) -> Iterator[dict[str, Any]]:
    """Yield a row per package and architecture."""
    for path in sorted(built.glob("*/manifest.json")):
        manifest = json.loads(path.read_text(encoding="utf-8"))
        for arch in sorted(manifest["archs"]):
            kernels = [kernel for kernel in manifest["kernels"] if kernel["arch"] == arch]
            files = {kernel["file"]: kernel["bytes"] for kernel in kernels}
            spills = [kernel["spills"] for kernel in kernels if kernel["spills"]]
            yield {
                "spec": manifest["spec"],
                "arch": arch,
                "kernels": len(files),
                "bytes": sum(files.values()),
                "registers": max((kernel["registers"] for kernel in kernels), default=0),
                "spilling": len(spills),
                "most_spilled": max(spills, default=0),
                "compilers": manifest["compilers"],
            }


def table(found: list[dict[str, Any]]) -> str:
    """Return a Markdown table with one line per package."""
    archs = sorted({row["arch"] for row in found})
    heads = [
        f"{arch}: {what}" for arch in archs for what in ("kernels", "KiB", "registers", "spilling")
    ]
    lines = [f"| spec | {' | '.join(heads)} |", "|" + "---|" * (1 + len(heads))]
    for spec in dict.fromkeys(row["spec"] for row in found):
        of = {row["arch"]: row for row in found if row["spec"] == spec}
        cells = [f"`{spec}`"]
        for arch in archs:
            row = of.get(arch)
            if row is None or not row["kernels"]:
                cells += [""] * 4
                continue
            spilling = (
                f"{row['spilling']} (up to {row['most_spilled']} bytes)" if row["spilling"] else ""
            )
            cells += [
                str(row["kernels"]),
                str(row["bytes"] // 1024),
                str(row["registers"]),
                spilling,
            ]
        lines.append(f"| {' | '.join(cells)} |")
    for arch in archs:
        total = [row for row in found if row["arch"] == arch]
        lines.append(
            f"\nAll {len(total)} for {arch}: {sum(row['kernels'] for row in total)} kernels, "
            f"{sum(row['bytes'] for row in total) / 2**20:.0f} MiB."
        )
    return "\n".join(lines)


def main() -> None:
    report, found = ROOT / "benchmarks/machine_code.json", list(rows(Path(sys.argv[1])))
    built = {row["spec"] for row in found}
    found += [
        row for row in json.loads(report.read_text(encoding="utf-8")) if row["spec"] not in built
    ]
    found.sort(key=lambda row: (row["spec"], row["arch"]))
    report.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    before, _, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    PAGE.write_text(f"{before}{MARK}{table(found)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()

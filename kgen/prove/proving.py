"""`kgen prove`: decide the obligations of a spec's kernels with z3."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError
from kgen.family import Target, family
from kgen.prove.obligations import Decision, Verdict, decide
from kgen.render.rendering import render_spec
from kgen.spec.too_large import too_large
from kgen.targets import asked_targets
from kgen.verify import ledger
from kgen.verify.emitted import parts, require_emitted
from kgen.verify.toolchain import Progress

BUDGET = 60.0
"""Time limit in seconds for all obligations of a spec."""

Row = dict[str, Any]


def prove_specs(
    loaded: Sequence[Any],
    generated: Path,
    timeout: float = 10.0,
    progress: Progress | None = None,
    record: bool = False,
    without: Callable[[Any], None] | None = None,
) -> list[Row]:
    """Decide the obligations of some specs, with at most `timeout` seconds for each obligation.

    Return rows of spec, target, kernel, obligation, verdict, seconds, message and counterexample.
    `without` is called with each spec that has no obligations. `record` enters the results in the
    ledger. It raises `KgenError` if an emitted file differs from the rendered one.
    """
    if record:
        ledger.require_readable(generated)
    rows: list[Row] = []
    for number, one in enumerate(loaded):
        targets = {name: target for name in asked_targets(one) if (target := _proved(one, name))}
        if not targets and without is not None:
            without(one)
        if record and targets:
            _require_current(one, generated)
        for name, target in targets.items():
            own = list(_rows(one, name, target, timeout))
            rows += own
            if record:
                _record(one, name, generated, own)
        if progress is not None:
            progress(number + 1, len(loaded), one.folder)
    return rows


def _proved(loaded: Any, name: str) -> Target | None:
    """Return a target of a spec if it has obligations, else None."""
    target = family(loaded.spec.kernel).targets.get(name)
    return target if target is not None and target.obligations is not None else None


def _rows(loaded: Any, name: str, target: Target, timeout: float) -> Iterator[Row]:
    assert target.obligations is not None
    begun = time.monotonic()
    with too_large(loaded):
        for obligation in target.obligations(loaded):
            start = time.monotonic()
            left = BUDGET - (start - begun)
            found = (
                decide(obligation, min(timeout, left))
                if left > 0
                else Decision(
                    Verdict.UNKNOWN, why=f"the limit of {BUDGET:g} seconds for the spec is reached"
                )
            )
            yield {
                "spec": loaded.folder,
                "target": name,
                "kernel": obligation.kernel,
                "obligation": obligation.what,
                "verdict": found.verdict.value,
                "seconds": time.monotonic() - start,
                "message": found.message,
                "counterexample": dict(found.counterexample),
            }


def _require_current(loaded: Any, generated: Path) -> None:
    """Raise `KgenError` if an emitted file differs from the rendered one, which the proof is
    about.
    """
    made = render_spec(loaded, None)
    for file in require_emitted(generated, loaded):
        for path in parts(file.path):
            text = made.get(path.name)
            if text is not None and path.read_text(encoding="utf-8") != text:
                message = f"`{path}` differs from the rendered file, so its proof is not recorded"
                raise KgenError(
                    Diagnostic(
                        "stale", message, file=str(loaded.path), hint=f"kgen render {loaded.path}"
                    )
                )


def _record(loaded: Any, target: str, generated: Path, rows: Sequence[Row]) -> None:
    versions = {"z3-solver": importlib.metadata.version("z3-solver")}
    for file in require_emitted(generated, loaded):
        if file.target == target:
            ledger.record_proved(
                generated,
                file.path,
                ledger.file_hash(file.path),
                rows,
                versions=versions,
            )

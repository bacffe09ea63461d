"""The verb `prove`."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Annotated

import typer

from kgen.cli import terminal
from kgen.cli.options import Form, Generated, Specs
from kgen.cli.terminal import Format
from kgen.cli.verbs import load_specs, verb
from kgen.diagnostics import EXIT_WRONG
from kgen.settings import settings


@verb("prove")
def prove(
    specs: Specs = None,
    timeout: Annotated[
        float,
        typer.Option(min=0.001, metavar="SECONDS", help="Time limit for each property to prove."),
    ] = 10.0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 1 also if z3 cannot prove or refute a property.")
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Record the result in the ledger (verified.json).")
    ] = False,
    generated: Generated = None,
    form: Form = Format.TEXT,
) -> int:
    """Prove kernels of attention and linear attention for all sizes.

    The solver z3 proves the following properties. Loads and stores are in bounds. Indices do not
    overflow. Attention computes each pair that the mask allows exactly once. Its masks and scores
    equal the spec. Linear attention stores each element once, and equals its recurrence. Only
    Triton kernels have proofs.
    """
    from kgen.prove.proving import prove_specs

    loaded, generated = load_specs(specs), generated or settings().generated
    with terminal.progress_bar() as progress:
        rows = prove_specs(
            loaded,
            generated,
            timeout,
            progress,
            record,
            lambda one: terminal.line(
                f"no obligations: {one.folder}: kgen has no proofs for {one.spec.kernel} kernels",
                sys.stderr,
            ),
        )
    columns = ("spec", "target", "kernel", "obligation", "verdict", "seconds", "message")
    shown = rows if form is Format.JSON else [row for row in rows if row["verdict"] != "proved"]
    terminal.table(shown, columns, form)
    verdicts = Counter(row["verdict"] for row in rows)
    last = ", ".join(
        f"{verdicts[verdict]} {verdict}" for verdict in ("proved", "refuted", "unknown")
    )
    terminal.summary(last, form)
    return EXIT_WRONG if verdicts["refuted"] or (strict and verdicts["unknown"]) else 0

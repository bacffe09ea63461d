"""`scripts/fuzz`: random specs, seed by seed, and what became of them."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from fuzzing.ledger import Ledger
from fuzzing.running import LIMIT, Outcome, smaller, tried
from kgen.verify.interpreter import ENVIRONMENT

SEEDS_OF_A_PROCESS = 50


def fuzz(
    seed: Annotated[
        int, typer.Option(help="The first one; by default the first that is not in the ledger.")
    ] = -1,
    count: Annotated[int, typer.Option(min=1, help="How many.")] = 100,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = os.cpu_count() or 1,
    record: Annotated[bool, typer.Option(help="Enter them in tests/fuzzing/seeds.json.")] = True,
) -> None:
    """Render random specs, spell them in other words, and run their kernels in the interpreters against float64.

    What fails is made smaller and printed; exit 1 if anything did.
    """
    console, ledger = Console(stderr=True), Ledger.read()
    first = ledger.next() if seed < 0 else seed
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fuzzing.running", "torch", "triton"])
    outcomes: list[Outcome] = []
    with (
        context.Pool(jobs, maxtasksperchild=SEEDS_OF_A_PROCESS) as pool,
        Progress(console=console, transient=True) as progress,
    ):
        task = progress.add_task("seeds", total=count)
        found = pool.imap(tried, range(first, first + count))
        for _ in range(count):
            # A process that died takes its seed with it: the wait for that ends, too.
            outcomes.append(found.next(timeout=4 * LIMIT))
            progress.advance(task)
        failed = [(outcome, pool.apply(smaller, (outcome,))) for outcome in outcomes if outcome.failed]
    for outcome, (_, least) in failed:
        console.print(f"seed {outcome.seed}: {outcome.what}", style="red", highlight=False)
        print(f"{least.message}\n{least.spec}")
    if record:
        ledger.enter(outcomes, {outcome.seed: least for outcome, (_, least) in failed})
    counts = Counter(outcome.what for outcome in outcomes)
    print(", ".join(f"{number} {what}" for what, number in sorted(counts.items())))
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(fuzz)

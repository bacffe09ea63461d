"""The verb `tune`."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from kgen.cli import terminal
from kgen.cli.current import AsIs, require_current
from kgen.cli.options import JOBS, Form, Generated, PartOf, Ray, Specs, TimedJobs
from kgen.cli.terminal import Format
from kgen.cli.verbs import elsewhere, load_specs, verb
from kgen.settings import settings


@verb("tune")
def tune(
    specs: Specs = None,
    shape: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="SHAPE", help="Size of the inputs: BATCHxHEADSxLENGTH, such as 2x16x8192."
        ),
    ] = None,
    jobs: TimedJobs = JOBS,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time limit per tile shape.")
    ] = 60.0,
    write: Annotated[
        bool,
        typer.Option(
            "--write/--no-write",
            help="Write the fastest tiles to tiles.json, which `kgen render` reads.",
        ),
    ] = True,
    ray: Ray = None,
    shard: PartOf = None,
    as_is: AsIs = False,
    generated: Generated = None,
    form: Form = Format.TEXT,
) -> int:
    """Time tile shapes of attention on this GPU; write tiles.json."""
    from kgen.cli.results import listener
    from kgen.tuning import TuneOptions, tune_specs
    from kgen.verify.farm.opening import hands
    from kgen.verify.farm.sharding import Shard

    part, generated = Shard.parse(shard), generated or settings().generated
    loaded = load_specs(specs)
    require_current(loaded, generated, as_is, form)
    with hands(jobs, ray) as who, terminal.progress_bar() as progress:
        options = TuneOptions(shape, timeout, write, part)
        rows = tune_specs(loaded, generated, options, who, listener(progress))
    columns = ("spec", "kernel", "tile", "milliseconds", "chosen", "error", *elsewhere(rows))
    terminal.table(rows, columns, form)
    timed, chosen = (
        sum(row["milliseconds"] is not None for row in rows),
        sum(row["chosen"] for row in rows),
    )
    terminal.summary(f"{timed} timed, {len(rows) - timed} dropped, {chosen} chosen", form)
    return 0

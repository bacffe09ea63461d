"""The verb `bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from kgen.cli import terminal
from kgen.cli.current import AsIs, require_current
from kgen.cli.options import Form, Generated, PartOf, Ray, Specs, TimedJobs, output_to
from kgen.cli.terminal import Format
from kgen.cli.verbs import BENCHMARKS, elsewhere, load_specs, verb
from kgen.diagnostics import EXIT_WRONG
from kgen.settings import settings

Against = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="PEERS",
        help="Implementations to compare with, comma-separated. "
        "For all families: eager, the formula in PyTorch operations. "
        "For attention: flex, flex-autotune, flex-flash, sdpa, varlen, cudnn-flex, fa3, fa4, "
        "kgen-triton, kgen-max. "
        "flex is compiled FlexAttention. "
        "flex-autotune is flex, compiled with mode max-autotune-no-cudagraphs. "
        "flex-flash is flex with the FlashAttention backend. "
        "sdpa is PyTorch's scaled_dot_product_attention. "
        "varlen is PyTorch's varlen_attn. "
        "cudnn-flex is cuDNN's flex_attn_func, for masks without score_mod. "
        "fa3 and fa4 are FlashAttention-3 and FlashAttention-4. "
        "kgen-triton is kgen, but only its portable kernels (triton.py). "
        "kgen-max is kgen with `return_max=True`, for specs with `row_max`. "
        "For norms: torch, compile, cudnn, liger, quack, copy. "
        "torch is rms_norm or layer_norm of torch.nn.functional. "
        "compile is torch.compile of eager. "
        "cudnn, liger and quack are the libraries cuDNN, Liger-Kernel and QuACK. "
        "copy copies a tensor. "
        "For linear_attention and chunk_output: fla, which is flash-linear-attention. "
        "Default: all except flex-autotune and eager. "
        "Peers that are not installed are listed at the end.",
    ),
]


@verb("bench")
def bench(
    specs: Specs = None,
    against: Against = None,
    shape: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="SHAPE",
            help="Size of the inputs. Separate several sizes by commas. "
            "`neutral` stands for the shapes of attention-gym's and Helion's benchmarks. "
            "`neutral:SHAPE` is one of these. "
            "For attention: BATCHxHEADSxLENGTH or BATCHxHEADSxKV_HEADSxLENGTH, such as 2x16x8192. "
            "For norms: ROWSxWIDTH. "
            "For linear_attention: BATCHxTOKENS or BATCHxTOKENSxHEADSxVALUE_HEADS. "
            "For chunk_output: TOKENS or BATCHxTOKENSxHEADSxVALUE_HEADS. "
            "HEADS are heads of q and k, VALUE_HEADS of v. "
            "Without them: 16 and 32, or the heads of the spec.",
        ),
    ] = None,
    first_call: Annotated[
        bool,
        typer.Option(
            "--first-call", help="Time the first call in a fresh process (attention only)."
        ),
    ] = False,
    output: Annotated[Optional[Path], output_to("benchmarks/")] = None,  # noqa: UP045
    jobs: TimedJobs = 1,
    ray: Ray = None,
    shard: PartOf = None,
    as_is: AsIs = False,
    generated: Generated = None,
    form: Form = Format.TEXT,
) -> int:
    """Time kernels against other implementations, interleaved in one run."""
    from kgen.bench.options import BenchOptions
    from kgen.bench.running import bench_specs
    from kgen.cli.results import listener
    from kgen.verify.farm.opening import hands
    from kgen.verify.farm.sharding import Shard

    part = Shard.parse(shard)
    options = BenchOptions(
        _peers(against), shape, output or BENCHMARKS, first_call=first_call, shard=part
    )
    loaded, generated = load_specs(specs), generated or settings().generated
    require_current(loaded, generated, as_is, form)
    with hands(jobs, ray) as who, terminal.progress_bar() as progress:
        rows = bench_specs(loaded, generated, options, who, listener(progress))
    missing = {row["peer"]: row["error"] for row in rows if row["missing"]}
    there = [row for row in rows if not row["missing"]]
    terminal.table(rows if form is Format.JSON else there, _columns(rows), form)
    for peer, reason in missing.items():
        terminal.summary(f"{peer}: {reason}", form)
    failed = [row for row in there if row["error"]]
    counts = f"{len(there) - len(failed)} measured, {len(failed)} failed"
    peers = "peer" if len(missing) == 1 else "peers"
    terminal.summary(counts + (f", {len(missing)} {peers} not installed" if missing else ""), form)
    # A peer that cannot run here is not an error of kgen.
    return EXIT_WRONG if any(str(row["peer"]).startswith("kgen") for row in failed) else 0


def _peers(against: str | None) -> list[str] | None:
    if against is None:
        return None
    return [peer.strip() for peer in against.split(",") if peer.strip()]


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns of the table of results: those that have values."""
    columns = ["spec"]
    if any("shape" in row for row in rows):
        columns.append("shape")
    columns += ["pass", "peer", "milliseconds"]
    columns += [name for name in ("tflops", "tbps") if any(row[name] is not None for row in rows)]
    return [*columns, "ratio", "error", *elsewhere(rows)]

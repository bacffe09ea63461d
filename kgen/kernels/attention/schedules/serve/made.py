"""The parts of the serving kernels in the files of a spec."""

from __future__ import annotations

from collections.abc import Sequence

from kgen.diagnostics import KgenError
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.schedules.serve.cache import append_kernel
from kgen.kernels.attention.schedules.serve.kernels import serve_kernels
from kgen.kernels.attention.schedules.serve.launcher import launcher_of
from kgen.kernels.attention.schedules.serve.plan import depends_on_tile, plan_serve, serves
from kgen.kernels.attention.targets.triton.made import InFile, Made, Needs, Planned
from kgen.kernels.attention.targets.triton.opening import table_of
from kgen.spec.source import Document


def made(planned: Planned, ahead: Sequence[Made]) -> Made:
    """Return the parts of the serving kernels, if the spec has them."""
    if not serves(planned.loaded):
        return Made()
    plan, name = plan_serve(planned.loaded), planned.loaded.spec.name
    if plan.in_batches and depends_on_tile(plan.attention):
        message = "`deterministic: batch` does not support a score that is linear in the position"
        hint = "remove `deterministic`, or use another `score_mod`"
        document = Document(planned.loaded.text, planned.loaded.path.as_posix())
        raise KgenError([document.value("unsupported-score", message, ("deterministic",), hint)])
    lowering, quantized = Lowering(plan.attention), plan.attention.spec.kv_dtype is not None
    kernels = serve_kernels(plan, lowering, quantized)
    launcher = launcher_of(plan, kernels, quantized)
    parts = InFile(
        modules=("functools",),
        kernels=(kernels.template, append_kernel(plan.attention.spec)),
        launcher=(launcher,),
    )
    tables = {"_SERVE_FEW_TILES": plan.few, "_SERVE_TILES": plan.many}
    return Made(
        together=parts,
        alone=parts,
        helpers=frozenset(lowering.helpers),
        tables=tuple(
            table_of(table, {chip: [tile] for chip, tile in tiles.items()})
            for table, tiles in tables.items()
            if tiles
        ),
        needs=Needs(multiprocessors=True),
        unbuilt="serve",
        offers=tuple(f"{name}_{of}" for of in ("serve", "serve_workspace", "append")),
    )

"""Compile an emitted `triton.py` for one architecture: `python -m kgen.build.compile_triton JOB`.

JOB is a pickled `BuildJob`. The worker writes cubins to the job's folder, and prints one JSON line
for each.
"""

from __future__ import annotations

import json
import struct
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import IO, Any

import triton
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.compiler import make_backend

from kgen.build.runtime.triton import Cubin
from kgen.build.worker_job import BuildJob
from kgen.verify.compile_triton import Launch, each_launch
from kgen.verify.processes import serve
from kgen.verify.resources import parameters, resources


def build_all(build: BuildJob, say: Callable[[Mapping[str, Any]], None]) -> None:
    """Compile the kernels of the family's calls, each also for arguments of any alignment."""
    seen: set[str] = set()

    def take(variant: str, launch: Launch) -> None:
        try:
            kernel = launch.compiled()
            if kernel.hash in seen:
                return
            for one in (kernel, *_for_any(launch, kernel)):
                if one.hash not in seen:
                    seen.add(one.hash)
                    say(_row(build, launch, one) | {"error": None})
        except Exception as error:
            traceback.print_exc()
            say(
                {
                    "error": (
                        f"{launch.function.fn.__name__}, {variant}: {type(error).__name__}: {error}"
                    )[:2000]
                }
            )

    for problem in _problems(build):
        each_launch(replace(build.job, problem=problem), take, build.sizes)


def _problems(build: BuildJob) -> Iterator[Any]:
    """Yield the spec's problem.

    If heads are constants that the spec leaves open, yield one per number of heads.
    """
    problem, sizes = build.job.problem, build.sizes
    if getattr(problem, "heads_v", 0) is not None:
        yield problem
        return
    for heads, group in product(sizes["heads"], [problem.group] if problem.group else sizes["gqa"]):
        yield replace(problem, heads=heads, heads_v=heads * group, group=group)


def _for_any(launch: Launch, kernel: Any) -> Iterator[Any]:
    """Compile the same kernel for arguments of any alignment, and without constants for arguments
    that are 1.
    """
    source = kernel.src
    constexprs = {p.name for p in launch.function.params if p.is_constexpr}
    ones = {
        name
        for i, (name, kind) in enumerate(source.signature.items())
        if kind == "constexpr" and name not in constexprs and source.constants[(i,)] is not None
    }
    if not ones and not _aligned(source):
        return
    kinds = {p.name: p.annotation_type or "i32" for p in launch.function.params}
    signature = {
        name: kinds[name] if name in ones else kind for name, kind in source.signature.items()
    }
    names = launch.function.arg_names
    constants = {
        path: value for path, value in source.constants.items() if names[path[0]] not in ones
    }
    target = triton.runtime.driver.active.get_current_target()
    options = make_backend(target).parse_options(dict(launch.options, debug=False)).__dict__
    yield triton.compile(
        type(source)(source.fn, signature, constants, {}), target=target, options=options
    )


def _aligned(source: Any) -> set[int]:
    """Return the indices of arguments that the machine code assumes to be multiples of 16.

    Triton lists other arguments, too, with empty attributes.
    """
    return {path[0] for path, known in source.attrs.items() if known}


def _row(build: BuildJob, launch: Launch, kernel: Any) -> dict[str, Any]:
    """Write the cubin of a kernel to the job's folder, and return its entry in the manifest."""
    cubin, meta, source = kernel.asm["cubin"], kernel.metadata, kernel.src
    if meta.num_ctas != 1 or meta.global_scratch_size or meta.profile_scratch_size:
        raise NotImplementedError("packages do not support kernels with clusters or scratch memory")
    aligned = _aligned(source)
    arguments = [
        [name, kind, source.constants[(i,)] if kind == "constexpr" else i in aligned]
        for i, (name, kind) in enumerate(source.signature.items())
    ]
    registers, spills = resources(cubin)
    row = {
        "kernel": launch.function.fn.__name__,
        "arch": build.job.arch,
        "capability": build.job.capability,
        **build.keep(launch.function.fn.__name__, cubin),
        "symbol": meta.name,
        "options": {n: v for n, v in launch.options.items() if n != "enable_fp_fusion"},
        "arguments": arguments,
        "parameters": parameters(cubin),
        "maps": [
            {n: told[n] for n in ("swizzle", "elem_size", "block_size")}
            | {"elem_type": TMA_DTYPE_DEVICE_TO_HOST[told["elem_type"]]}
            for told in getattr(meta, "tensordesc_meta", None) or []
        ],
        "warps": meta.num_warps,
        "shared": int(meta.shared),
        "programmatic": bool(meta.launch_pdl),
        "cooperative": bool(meta.launch_cooperative_grid),
        "registers": registers,
        "spills": spills,
    }
    sizes = [struct.calcsize(form) for form in Cubin(build.folder, row).forms]
    if sizes != [size for _, size in row["parameters"]]:
        raise AssertionError(
            f"expected parameters {row['parameters']}, got arguments of {sizes} bytes"
        )
    return row


def main(build: BuildJob, lines: IO[str]) -> None:
    """Run a job."""
    build_all(build, lambda row: print(json.dumps(row), file=lines, flush=True))


if __name__ == "__main__":
    serve(main)

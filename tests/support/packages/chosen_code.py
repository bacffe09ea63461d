"""Launches for which a package takes other machine code than was compiled for them:
`chosen_code.py OUT ARCH SPEC...`.

Build packages with fake machine code under OUT. Print JSON with the number of launches and a list
of `[spec, kernel, variant]`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from kgen.build.runtime import triton as runtime
from kgen.spec.load import load
from kgen.verify.compile_triton import Launch, each_launch
from kgen.verify.compiling import CompileJob
from kgen.verify.emitted import require_emitted
from kgen.verify.families import problem_of
from support.packages.build_on_paper import SIZES, build, compiled


def launches(out: Path, spec: str, arch: str) -> Iterator[tuple[str, str, str, str | None]]:
    """Yield kernel, variant, the hash of the code compiled for the launch, and of the code in the
    package.
    """
    build(out, [spec], [arch])
    loaded = load(spec)
    package = runtime.Package(loaded.spec.name, out / loaded.spec.name)
    (file,) = (one for one in require_emitted(out / "generated", loaded) if one.target == "triton")
    job = CompileJob(problem_of(loaded, "triton"), file, arch)
    found = []

    def take(variant: str, launch: Launch) -> None:
        image = launch.compiled().asm["cubin"]
        kernel = runtime.Kernel(launch.function.fn, package)
        args = [_standing_in(x) for x in launch.args]
        meta = {
            n: x
            for n, x in {**launch.constants, **launch.options}.items()
            if n != "enable_fp_fusion"
        }
        with mock.patch.object(runtime, "_arch", return_value=job.capability):
            cubin = kernel._found(*kernel._told(args, meta), args)
        taken = None if cubin is None else cubin.row["sha256"]
        found.append((kernel.__name__, variant, hashlib.sha256(image).hexdigest(), taken))

    with mock.patch("triton.compile", compiled), mock.patch("triton.compiler.compile", compiled):
        each_launch(job, take, SIZES)
    yield from found


def _standing_in(x: Any) -> Any:
    if not hasattr(x, "block_shape"):
        return x
    return runtime.Descriptor(x.base, x.shape, x.strides, x.block_shape)


def main(out: str, arch: str, *specs: str) -> None:
    """Print the result for all specs."""
    count, others = 0, []
    for spec in specs:
        for kernel, variant, wanted, taken in launches(Path(out), spec, arch):
            count += 1
            if wanted != taken:
                others.append([Path(spec).stem, kernel, variant])
    print(json.dumps({"launches": count, "others": others}))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""No norm kernel in CUDA spills.

The verdicts are on record, because compiling all shapes takes minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cuda.core import Program, ProgramOptions

from kgen.render.rendering import render_spec
from kgen.spec.load import loads
from kgen.verify.families import problem_of
from kgen.verify.resources import usages
from kgen.verify.toolchain import import_file

HEAD = "kernel: norm\nname: sample\nwidth: any\ntargets: {cuda: {}}\n"
NORMS = {"rms": "norm: rms\ndtype: bf16\n", "layer": "norm: layer\nbias: true\ndtype: fp16\n"}


@pytest.mark.thorough
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("which", NORMS)
def test_no_shape_spills(which: str, arch: str, tmp_path: Path, verdict: Any) -> None:
    """Includes every kernel that the launcher may choose on a chip.

    Chips from sm_90 on have clusters.
    """
    loaded = loads(HEAD + NORMS[which], "sample.yaml")
    for name, text in render_spec(loaded).items():
        (tmp_path / name).write_text(text)
    verdict(problem_of(loaded), tmp_path)

    module: Any = import_file(tmp_path / "cuda.py", f"emitted_all_{which}_{arch}")
    names = {"sample_kernels::columns_kernel", "sample_kernels::finalize_kernel"}
    for kernel, shapes in module._SHAPES.items():
        names |= {module._name(kernel, s) for s in shapes if s.cluster == 1 or arch != "sm_80"}
    assert len(names) > 60

    # Compile all kernels at once, so that the source is parsed once.
    program = Program(
        (tmp_path / "cuda.cu").read_text(), "c++", ProgramOptions(arch=arch, std="c++17")
    )
    found = usages(bytes(program.compile("cubin", name_expressions=tuple(names)).code))
    assert len(found) == len(names)
    assert {name: local for name, (_, local, _) in found.items() if local} == {}

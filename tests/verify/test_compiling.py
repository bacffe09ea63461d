from __future__ import annotations

from pathlib import Path

import pytest
from support.specs.hand_built import causal_alibi, render

from kgen.diagnostics import KgenError
from kgen.spec.load import load
from kgen.verify import compile_cuda, compiling, ledger
from kgen.verify.compiling import CompileJob, CompileOptions, compile_specs
from kgen.verify.emitted import emitted_files
from kgen.verify.families import problem_of
from kgen.verify.toolchain import import_file

ROOT = Path(__file__).resolve().parents[2]


def test_kernels_compile_without_a_gpu(tmp_path, verdict):
    render(causal_alibi(), tmp_path)
    verdict(problem_of(causal_alibi()), tmp_path)
    rows = compile_specs([causal_alibi()], tmp_path, CompileOptions(["sm_90"], record=True))
    assert all(row["ok"] and row["arch"] == "sm_90" and row["limit"] == 227 * 1024 for row in rows)
    assert {(row["kernel"], row["variant"]) for row in rows} == {
        (kernel, variant)
        for kernel in ("_forward_kernel", "_backward_kernel")
        for variant in ("aligned", "strided")
    }
    assert all(row["registers"] >= 16 and row["spills"] >= 0 and row["shared"] > 0 for row in rows)
    (entry,) = ledger.read(tmp_path).values()
    assert set(entry["records"]["compiled sm_90"]["kernels"]) == {
        "_forward_kernel",
        "_backward_kernel",
    }


def test_a_ledger_that_cannot_be_read_ends_a_recorded_run_before_it_begins(tmp_path, monkeypatch):
    render(causal_alibi(), tmp_path)
    (tmp_path / ledger.FILENAME).write_text("{bad")
    monkeypatch.setattr(compiling, "_rows", lambda *arguments: pytest.fail("kernels were compiled"))
    with pytest.raises(KgenError, match="cannot read the ledger"):
        compile_specs([causal_alibi()], tmp_path, CompileOptions(["sm_90"], record=True))


def test_what_does_not_compile_or_fit_is_a_row(tmp_path, monkeypatch, verdict):
    path = render(causal_alibi(), tmp_path)
    # The forward kernel fails to compile. The backward kernels compile, but exceed the lowered
    # limit.
    path.write_text(
        path.read_text().replace("acc = acc / tl.where", "acc = no_such_name / tl.where")
    )
    monkeypatch.setitem(compiling.SHARED_LIMITS, 80, 9 * 1024)
    verdict(problem_of(causal_alibi()), tmp_path)
    rows = compile_specs([causal_alibi()], tmp_path, CompileOptions(["sm_80"]))
    errors = {(row["kernel"], row["variant"]): row["error"] for row in rows if not row["ok"]}
    assert "no_such_name" in errors["_forward_kernel", "aligned"]
    assert "bytes of shared memory, sm_80 has 9216" in errors["_backward_kernel", "aligned"]


def test_a_launcher_that_fails_is_a_row(tmp_path, verdict):
    path = render(causal_alibi(), tmp_path)
    path.write_text("raise RuntimeError('no luck')\n")
    verdict(problem_of(causal_alibi()), tmp_path)
    (row,) = compile_specs([causal_alibi()], tmp_path, CompileOptions(["sm_90"]))
    assert not row["ok"]
    assert "no luck" in row["error"]


@pytest.mark.parametrize(
    "arch",
    ["sm_1", "sm_80a", "sm_90f", "sm_120g", "90a", "sm_090", "sm_\uff19\uff10", "sm_", "", "SM_90"],
)
def test_unknown_arch(arch, tmp_path):
    render(causal_alibi(), tmp_path)
    with pytest.raises(KgenError) as caught:
        compile_specs([causal_alibi()], tmp_path, CompileOptions(["sm_90", arch]))
    (found,) = caught.value.diagnostics
    assert found.message == f"unknown architecture `{arch}`"
    assert "sm_" in found.hint


def test_the_capability_of_an_arch():
    archs = {
        "sm_80": 80,
        "sm_90": 90,
        "sm_90a": 90,
        "sm_100": 100,
        "sm_100a": 100,
        "sm_100f": 100,
        "sm_120f": 120,
    }
    assert {arch: compiling.capability(arch) for arch in archs} == archs


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_100f"])
def test_cuda_of_a_chip_alone(arch, monkeypatch):
    """The launcher compares the number of the architecture; the kernels are compiled for its full
    name.
    """
    pytest.importorskip("cuda.core")
    asked, said = set(), []

    def imported(path, name):
        module = import_file(path, name)
        module._compiled = lambda kernel, arch: asked.add(arch)
        return module

    monkeypatch.setattr(compile_cuda, "import_file", imported)
    monkeypatch.setattr(compile_cuda, "usage_of", lambda code, name: (0, 0, 0))
    loaded = load(ROOT / "specs/rms_norm.yaml")
    (file,) = (f for f in emitted_files(ROOT / "generated", loaded) if f.target == "cuda")
    compile_cuda.compile_all(CompileJob(problem_of(loaded), file, arch), said.append)
    assert asked == {arch}
    assert any("backward_kernel" in row["kernel"] for row in said)
    assert [row["error"] for row in said if row["error"]] == []

from __future__ import annotations

import pytest
from standins import causal_alibi, render

from kgen.diagnostics import KgenError
from kgen.verify import compiling, ledger
from kgen.verify.compiling import compile_specs


def test_kernels_compile_without_a_gpu(tmp_path):
    render(causal_alibi(), tmp_path)
    rows = compile_specs([causal_alibi()], tmp_path, ["sm_90"], record=True)
    assert all(row["ok"] and row["arch"] == "sm_90" and row["limit"] == 227 * 1024 for row in rows)
    assert {(row["kernel"], row["variant"]) for row in rows} == {
        (kernel, variant)
        for kernel in ("_forward_kernel", "_backward_kernel")
        for variant in ("aligned", "strided")
    }
    assert all(row["registers"] >= 16 and row["spills"] >= 0 and row["shared"] > 0 for row in rows)
    (entry,) = ledger.read(tmp_path).values()
    assert set(entry["records"]["compiled sm_90"]["kernels"]) == {"_forward_kernel", "_backward_kernel"}


def test_what_does_not_compile_or_fit_is_a_row(tmp_path, monkeypatch):
    path = render(causal_alibi(), tmp_path)
    # The forward kernel no longer compiles; the backward ones do, but find a smaller limit.
    path.write_text(path.read_text().replace("acc = acc / tl.where", "acc = no_such_name / tl.where"))
    monkeypatch.setitem(compiling.SHARED_LIMITS, 80, 9 * 1024)
    rows = compile_specs([causal_alibi()], tmp_path, ["sm_80"])
    errors = {(row["kernel"], row["variant"]): row["error"] for row in rows if not row["ok"]}
    assert "no_such_name" in errors["_forward_kernel", "aligned"]
    assert "bytes of shared memory, sm_80 has 9216" in errors["_backward_kernel", "aligned"]


def test_a_launcher_that_fails_is_a_row(tmp_path):
    path = render(causal_alibi(), tmp_path)
    path.write_text("raise RuntimeError('no luck')\n")
    (row,) = compile_specs([causal_alibi()], tmp_path, ["sm_90"])
    assert not row["ok"]
    assert "no luck" in row["error"]


def test_unknown_arch(tmp_path):
    render(causal_alibi(), tmp_path)
    with pytest.raises(KgenError, match="unknown architecture `sm_1`"):
        compile_specs([causal_alibi()], tmp_path, ["sm_1"])
    assert compiling.capability("sm_90a") == 90

"""Specs with several values of a field: a folder per combination, and one function that
dispatches.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.interpreters.own_process import interpreted

from kgen.diagnostics import KgenError
from kgen.render.project import load_all, remember, render_all
from kgen.render.writer import apply, compute_changes
from kgen.spec.load import load, loads_variants

ATTENTION = """
kernel: attention
name: many
dtype: [bf16, fp16]
head_dim: [16, {qk: 32, v: 16}]
mask_mod: q_idx >= kv_idx
"""
FOLDERS = ["bf16_d16", "bf16_d32_16", "fp16_d16", "fp16_d32_16"]


def rendered(folder: Path, text: str) -> Path:
    """Render a spec and return its folder."""
    (folder / "specs").mkdir(exist_ok=True)
    spec, generated = folder / "specs" / "many.yaml", folder / "generated"
    spec.write_text(text)
    made = render_all([spec], generated, cached=True)
    apply(compute_changes([output for each in made for output in each.outputs], generated))
    remember(made, generated)
    return generated


def test_a_folder_for_each_combination(tmp_path: Path) -> None:
    generated = rendered(tmp_path, ATTENTION)
    there = sorted(path.parent.name for path in generated.glob("many/*/triton.py"))
    assert there == sorted(FOLDERS)
    text = (generated / "many/__init__.py").read_text()
    assert re.findall(r"from \.(\w+) import many", text) == FOLDERS
    spec = tmp_path / "specs/many.yaml"
    assert [one.variant for one in load_all([spec])] == FOLDERS
    assert [each.spec_text for each in render_all([spec], generated, cached=True)] == [None]


def test_what_is_listed_no_more_is_pruned(tmp_path: Path) -> None:
    rendered(tmp_path, ATTENTION)
    generated = rendered(tmp_path, ATTENTION.replace("[bf16, fp16]", "[fp16]"))
    assert (
        sorted(path.name for path in (generated / "many").iterdir() if path.is_dir()) == FOLDERS[2:]
    )
    generated = rendered(
        tmp_path, ATTENTION.replace("[bf16, fp16]", "fp16").replace("[16, {qk: 32, v: 16}]", "16")
    )
    assert (generated / "many/triton.py").exists()
    assert not any(path.is_dir() for path in (generated / "many").iterdir())
    (tmp_path / "specs/many.yaml").unlink()
    apply(compute_changes([], generated))
    assert not (generated / "many").exists()


def test_an_edit_of_a_variant_is_not_lost(tmp_path: Path) -> None:
    generated = rendered(tmp_path, ATTENTION)
    edited = generated / "many/bf16_d16/triton.py"
    edited.write_text(edited.read_text() + "# mine\n")
    with pytest.raises(KgenError, match="edited by hand"):
        rendered(tmp_path, ATTENTION.replace("[bf16, fp16]", "[fp16]"))
    assert edited.read_text().endswith("# mine\n")


def test_a_variant_is_what_the_spec_of_its_values_is(tmp_path: Path) -> None:
    several = rendered(tmp_path, ATTENTION) / "many/fp16_d32_16"
    texts = {path.name: path.read_text().partition('"""')[2] for path in several.glob("*.py")}
    one = ATTENTION.replace("[bf16, fp16]", "fp16").replace(
        "[16, {qk: 32, v: 16}]", "{qk: 32, v: 16}"
    )
    alone = rendered(tmp_path, one) / "many"
    assert texts == {path.name: path.read_text().partition('"""')[2] for path in alone.glob("*.py")}


def called(folder: str) -> list[str]:
    """Call each variant, and one that does not exist. Return the dtypes and messages."""
    import torch

    sys.path.insert(0, folder)
    from many import many

    found = []
    for dtype in (torch.bfloat16, torch.float16):
        for qk, v in ((16, 16), (32, 16)):
            q, k = (torch.randn(1, 2, 20, qk, dtype=dtype, requires_grad=True) for _ in range(2))
            value = torch.randn(1, 2, 20, v, dtype=dtype, requires_grad=True)
            out = many(q, k, value, scale=0.3)
            out.sum().backward()
            want = torch.nn.functional.scaled_dot_product_attention(
                *(x.detach().double() for x in (q, k, value)), is_causal=True, scale=0.3
            )
            assert q.grad is not None
            torch.testing.assert_close(out.double(), want, rtol=0, atol=2e-2)
            found.append(str(out.dtype))
    for name in FOLDERS:
        found.append(str(f"many.{name}" in sys.modules))
    try:
        many(q, q, q)
    except ValueError as error:
        found.append(str(error))
    return found


def test_the_function_chooses(tmp_path: Path) -> None:
    generated = rendered(tmp_path, ATTENTION)
    *found, refusal = interpreted(called, str(generated))
    assert found == ["torch.bfloat16"] * 2 + ["torch.float16"] * 2 + ["True"] * 4
    assert refusal == (
        "many: there are bf16_d16, bf16_d32_16, fp16_d16, fp16_d32_16, and nothing for dtype "
        "torch.float16 and "
        "heads of (32, 32)"
    )


def kgen(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kgen", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_verbs_take_each_variant(tmp_path: Path) -> None:
    spec = tmp_path / "many.yaml"
    spec.write_text("kernel: norm\nnorm: rms\nname: many\nwidth: any\ndtype: [bf16, fp32]\n")
    assert kgen(tmp_path, "render", str(spec)).returncode == 0
    status = json.loads(kgen(tmp_path, "status", str(spec), "--format", "json").stdout)
    rows = [row for row in status if "spec" in row] if isinstance(status, list) else status["rows"]
    assert [row["file"] for row in rows] == [
        f"generated/many/{d}/triton.py" for d in ("bf16", "fp32")
    ]
    assert "many/fp32" in kgen(tmp_path, "list", str(spec)).stdout
    assert "Variant bf16, one of 2." in kgen(tmp_path, "explain", str(spec)).stdout
    alone = kgen(tmp_path, "render", "--single", "--stdout", str(spec))
    assert alone.returncode == 2
    assert "copy the folder `many/bf16`" in alone.stderr


@pytest.mark.parametrize(
    ("field", "value", "code", "column"),
    [
        ("dtype", "[]", "bad-value", 1),
        ("dtype", "[bf16, bf16]", "duplicate-value", 15),
        ("dtype", "[bf16, fp31]", "bad-value", 15),
        ("head_dim", "[16, {qk: 16, v: 16}]", "duplicate-value", 1),
        ("head_dim", "[16, 4096]", "out-of-range", 16),
        ("dtype", "[[bf16]]", "bad-value", 1),
        ("gqa", "[1, 2]", "bad-value", 1),
    ],
)
def test_a_list_that_is_wrong(field: str, value: str, code: str, column: int) -> None:
    text = re.sub(rf"^{field}: .*\n", "", ATTENTION, flags=re.MULTILINE) + f"{field}: {value}\n"
    with pytest.raises(KgenError) as caught:
        loads_variants(text, "many.yaml")
    (found,) = caught.value.diagnostics
    assert (found.code, found.column) == (code, column), found


def test_an_error_of_all_variants_is_one() -> None:
    with pytest.raises(KgenError) as caught:
        loads_variants(ATTENTION.replace("q_idx >= kv_idx", "q_idx >= nobody"), "many.yaml")
    assert len(list(caught.value.diagnostics)) == 1


def test_load_has_one(tmp_path: Path) -> None:
    (tmp_path / "many.yaml").write_text(ATTENTION)
    with pytest.raises(KgenError, match="bf16_d16, bf16_d32_16"):
        load(tmp_path / "many.yaml")


def test_the_schema_has_lists() -> None:
    from kgen.spec.schema import json_schema

    models: dict[str, Any] = json_schema()["$defs"]
    several = [
        options
        for options in models["AttentionSpec"]["properties"]["dtype"]["anyOf"]
        if "items" in options
    ]
    assert several == [
        {
            "type": "array",
            "items": {"enum": ["bf16", "fp16", "fp32"], "type": "string"},
            "minItems": 1,
        }
    ]
    assert "anyOf" in models["NormSpec"]["properties"]["dtype"]

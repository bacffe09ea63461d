"""Output in addition to result rows: passes without Hopper kernels, spills, the toolchain, facts as
data.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from kgen.cli import app
from kgen.cli.doctor import examine

FP32 = (
    "kernel: attention\nname: sample\ndtype: fp32\nhead_dim: 64\n"
    "passes: [forward, backward, decode]\n"
)
REMARK = (
    "sample: no kernels for Hopper in forward and backward: "
    "the dtype is fp32, and Hopper kernels need bf16 or fp16"
)


def kgen(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        app([*arguments], prog_name="kgen")
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "sample.yaml").write_text(FP32)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_render_says_what_has_no_kernels_for_hopper(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The remark appears once per spec, directly before the last line, and only if files change."""
    code, out, err = kgen(capsys, "render", "--check")
    assert (code, out) == (1, "3 files checked, 3 differ, 0 orphaned, 0 edited\n")
    assert err.splitlines()[-1] == REMARK
    said = json.loads(kgen(capsys, "render", "--check", "--format", "json")[1])
    assert said["remarks"] == [REMARK]
    out = kgen(capsys, "render")[1]
    assert out.splitlines()[-2:] == [REMARK, "3 files rendered, 3 changed, 0 deleted"]
    assert out.count(REMARK) == 1
    assert kgen(capsys, "render")[1] == "3 files rendered, 0 changed, 0 deleted\n"
    assert kgen(capsys, "render", "--check") == (
        0,
        "3 files checked, 0 differ, 0 orphaned, 0 edited\n",
        "",
    )
    assert kgen(capsys, "render", "causal")[1].count("no kernels for Hopper") == 0


def test_variants_share_a_remark(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "specs" / "sample.yaml").write_text(FP32.replace("64", "[64, 128]"))
    assert kgen(capsys, "render")[1].count(REMARK) == 1


def test_compile_shows_spills(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(*_: object) -> list[dict[str, Any]]:
        row = {
            "spec": "sample",
            "target": "triton",
            "variant": "plain",
            "arch": "sm_90",
            "registers": 255,
        }
        row |= {"shared": 1, "limit": 2, "ok": True, "error": None}
        return [row | {"kernel": "_dq", "spills": n} for n in (0, 8, 1456)] + [
            row | {"kernel": "_bad", "spills": None, "ok": False, "error": "no"}
        ]

    monkeypatch.setattr("kgen.verify.compiling.compile_specs", rows)
    code, out, err = kgen(capsys, "compile")
    assert code == 1
    assert [line.split()[-2] for line in out.splitlines()[1:-1]] == [
        "yes",
        "spills",
        "spills",
        "no",
    ]
    assert out.splitlines()[-1] == "3 compiled, 1 failed, 2 with spills"
    assert err.splitlines() == [
        "spills: sample triton _dq plain sm_90: 1456 bytes per thread",
        "spills: sample triton _dq plain sm_90: 8 bytes per thread",
    ]
    data = json.loads(kgen(capsys, "compile", "--format", "json")[1])
    assert [row["ok"] for row in data] == [True, True, True, False]


def test_doctor_looks_for_everything_that_a_verb_needs() -> None:
    rows = {row["name"]: row for row in examine()}
    wanted = {
        "NVRTC",
        "cuda-core",
        "transformers",
        "z3-solver",
        "ray",
        "nvidia-cutlass-dsl",
        "torch",
        "triton",
    }
    assert wanted <= {*rows}
    for package in ("cuda-core", "transformers", "z3-solver"):
        assert rows[package]["version"] == metadata.version(package)
    assert rows["NVRTC"]["version"] == metadata.version("nvidia-cuda-nvrtc")


def test_doctor_says_what_brings_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    rows = {row["name"]: row for row in examine()}
    assert not rows["NVRTC"]["found"]
    assert (
        rows["NVRTC"]["version"]
        == rows["cuda-core"]["version"]
        == "missing: pip install 'kgen-kernels[cuda]'"
    )


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "specs").glob("*.yaml"))[::6])
def test_facts_have_the_fields_that_are_documented(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = kgen(capsys, "explain", str(ROOT / "specs" / f"{name}.yaml"), "--format", "json")
    facts = json.loads(out)
    assert code == 0
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    section = text.partition("### As data")[2].partition("\n#")[0]
    documented = [row.split("|") for row in section.splitlines() if row.startswith("| `")]
    fields = {(row[1].strip().strip("`"), row[2].strip()) for row in documented}
    assert {name for name, of in fields if of in ("every spec", facts["kernel"])} == {*facts}
    assert "text" not in facts


def test_facts_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    """Facts are numbers, flags and lists. No program has to parse sentences."""
    path = str(ROOT / "specs" / "longformer.yaml")
    facts = json.loads(kgen(capsys, "explain", path, "--length", "1024", "--format", "json")[1])
    assert facts["expressions"]["mask_mod"]["written"].startswith("abs(q_idx - kv_idx) <= window")
    assert facts["params"]["window"] == {"type": "int", "value": 256, "runtime": False}
    forward = next(loop for loop in facts["loops"] if loop["kernel"] == "forward")
    assert (forward["tile_of"], forward["visits"], len(forward["ranges"])) == ("q_idx", "kv_idx", 2)
    assert not facts["hopper"]["passes"]["forward"]["kernels"]
    assert (
        facts["hopper"]["passes"]["forward"]["reason"] == "the mask leaves several ranges of keys"
    )
    assert all(isinstance(tile["block_m"], int) for tile in facts["tiles"])
    (grid,) = facts["grids"]
    assert len(grid["rows"]) == 1024 // grid["tile"][0]
    assert sum(grid["shares"].values()) == pytest.approx(1)

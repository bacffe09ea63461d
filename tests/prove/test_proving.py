"""`kgen prove`: exit codes, output, and entries in the ledger."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WIDE = """\
kernel: attention
name: wide
dtype: bf16
head_dim: 64
lengths: {q: any, kv: any}
params: {window: 2147483647}
mask_mod: q_idx >= kv_idx and q_idx - kv_idx < window
passes: [forward, backward]
targets: {triton: {}}
"""


def kgen(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = f"{before}\nimport sys; sys.argv[0] = 'kgen'; from kgen.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )


def test_a_stock_spec_is_proved_and_said_to_be(tmp_path: Path) -> None:
    """The last line counts the proofs. The ledger, `kgen status` and `kgen explain` show them."""
    into = ("--generated", str(tmp_path))
    assert kgen("render", "specs/full.yaml", "-o", str(tmp_path)).returncode == 0
    run = kgen("prove", "specs/full.yaml", "--record", *into)
    assert (run.returncode, run.stderr) == (0, "")
    proved = int(run.stdout.split()[0])
    assert run.stdout == f"{proved} proved, 0 refuted, 0 unknown\n"
    files = json.loads((tmp_path / "verified.json").read_text())["files"]
    (record,) = [entry["records"]["proof"] for entry in files.values()]
    assert (record["proved"], record["unknown"], [*record["versions"]]) == (
        proved,
        0,
        ["z3-solver"],
    )
    (row,) = json.loads(kgen("status", "specs/full.yaml", "--format", "json", *into).stdout)
    assert row["proof"] == {"proved": proved, "unknown": 0}
    assert f" {proved} of {proved}" in kgen("status", "specs/full.yaml", *into).stdout
    said = kgen("explain", "specs/full.yaml", *into).stdout.splitlines()[-1]
    assert said.startswith(
        f"proof of triton.py: {proved} obligations proved, 0 unknown (z3-solver "
    )


def test_only_what_the_spec_makes_is_recorded(tmp_path: Path) -> None:
    kgen("render", "specs/full.yaml", "-o", str(tmp_path))
    path = tmp_path / "full" / "triton.py"
    path.write_text(path.read_text() + "\n")
    run = kgen("prove", "specs/full.yaml", "--record", "--generated", str(tmp_path))
    assert run.returncode == 2
    assert "differs from the rendered file" in run.stderr
    assert not (tmp_path / "verified.json").exists()


def test_a_window_as_wide_as_an_integer_is_not_added_to_a_position(tmp_path: Path) -> None:
    """The window is a param or a number. The last query that sees a key would be beyond 32 bits."""
    path = tmp_path / "wide.yaml"
    for text in (
        WIDE,
        WIDE.replace("params: {window: 2147483647}\n", "").replace("< window", "< 2147483647"),
    ):
        path.write_text(text)
        run = kgen("prove", str(path), "--format", "json")
        verdicts = {row["obligation"]: row["verdict"] for row in json.loads(run.stdout)}
        assert verdicts["no int32 expression overflows"] == "proved"
        assert " 0 refuted" in run.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "condition",
    [
        "q_idx >> 6 == kv_idx >> 6 and (q_idx & 63) >= (kv_idx & 63)",
        "abs(q_idx // 64 - kv_idx // 32) <= 2",
        "q_idx - q_idx % 64 == kv_idx - kv_idx % 64",
        "q_idx // 64 - kv_idx // 64 <= window",
        "kv_idx // 4 <= q_idx",
    ],
)
def test_masks_by_block_are_proved(condition: str, tmp_path: Path) -> None:
    """Multiples of run-time numbers and of long sequences stay within 32 bits."""
    path = tmp_path / "wide.yaml"
    params = "params: {window: {type: int, runtime: true}}\n" if "window" in condition else ""
    text = WIDE.replace("params: {window: 2147483647}\n", params)
    path.write_text(text.replace("q_idx >= kv_idx and q_idx - kv_idx < window", condition))
    run = kgen("prove", str(path), "--strict")
    assert (run.returncode, run.stdout.splitlines()[-1].split(", ")[1:]) == (
        0,
        ["0 refuted", "0 unknown"],
    )


def test_what_is_refuted_fails_with_its_numbers(tmp_path: Path) -> None:
    """A position may be 2**29, so eight times a position overflows."""
    path = tmp_path / "wide.yaml"
    path.write_text(
        WIDE.replace("window: 2147483647", "window: 8").replace(
            "q_idx - kv_idx <", "kv_idx < q_idx *"
        )
    )
    run = kgen("prove", str(path), "--format", "json")
    assert run.returncode == 1
    wrong = [row for row in json.loads(run.stdout) if row["verdict"] == "refuted"]
    assert {row["obligation"] for row in wrong} == {"no int32 expression overflows"}
    assert all(int(row["counterexample"]["SQ"]) > 2**28 for row in wrong)
    assert f"{len(wrong)} refuted" in run.stderr.splitlines()[-1]


def test_what_is_unknown_fails_where_that_is_asked() -> None:
    run = kgen("prove", "specs/pair_bias.yaml", "--strict")
    assert run.returncode == 1
    assert "beyond the encoding: pair_ring" in run.stdout
    assert kgen("prove", "specs/pair_bias.yaml").returncode == 0


def test_a_family_without_obligations_says_so() -> None:
    run = kgen("prove", "specs/rms_norm.yaml")
    assert (run.returncode, run.stdout) == (0, "0 proved, 0 refuted, 0 unknown\n")
    assert run.stderr == "no obligations: rms_norm: kgen has no proofs for norm kernels\n"


def test_a_bad_spec_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(WIDE.replace("window: 2147483647", "window: 2147483648"))
    run = kgen("prove", str(path))
    assert (run.returncode, run.stdout) == (2, "")
    assert f"{path}:6:" in run.stderr


@pytest.mark.parametrize("spec", ["specs/full.yaml", "specs/rms_norm.yaml"])
def test_without_z3_one_sentence(spec: str) -> None:
    run = kgen("prove", spec, before="import sys; sys.modules['z3'] = None")
    assert (run.returncode, run.stdout) == (3, "")
    assert "z3 cannot be imported" in run.stderr
    assert "pip install 'kgen-kernels[prove]'" in run.stderr

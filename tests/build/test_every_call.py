"""A package has machine code for all calls of its launcher, for the sizes that it was built for.

Every GPU case is called, without launching kernels.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.packages.c_on_paper import python
from support.packages.loading import package_of

from kgen.build.package import BuildOptions, build_specs
from kgen.build.runtime import triton as runtime
from kgen.render.rendering import render_spec
from kgen.spec.load import load
from kgen.verify import compare
from kgen.verify.families import Subject, family_of, problem_of

SPECS = {
    "sunk": (
        "{kernel: attention, name: sunk, dtype: fp16, head_dim: 32, sinks: true, gqa: 2, "
        "mask_mod: q_idx >= kv_idx, score_mod: 30 * tanh(score / 30)}",
        {},
    ),
    "padded": (
        "{kernel: attention, name: padded, dtype: fp16, head_dim: 64, "
        "lengths: {q: any, kv: {per_batch: true}}, mask_mod: q_idx >= kv_idx}",
        {},
    ),
    "cached": (
        "{kernel: attention, name: cached, dtype: fp16, head_dim: 32, gqa: 4, "
        "lengths: {q: any, kv: {per_batch: true}}, mask_mod: q_idx >= kv_idx, passes: [forward, "
        "decode]}",
        {"batch": (1, 2, 4, 8, 16, 32, 64, 128)},
    ),
    "added": (
        "{kernel: norm, name: added, norm: rms, dtype: fp16, width: 64, residual: in_out, "
        "passes: [forward, backward]}",
        {},
    ),
    "chunks": (
        "{kernel: chunk_output, name: chunks, dtype: bf16, head_dim: 64, heads: {qk: 2, v: 4}, "
        "chunk_size: 64, "
        "varlen: true, passes: [forward]}",
        {},
    ),
}
ARCHS = ("sm_80", "sm_90a")
OTHER_STRIDES = {"padded", "stepped"}
"""Cases of chunk_output with other strides of tokens, which are constants of the machine code."""
CHOSEN = (
    *(
        "causal",
        "gpt_oss",
        "varlen_causal",
        "decode_alibi",
        "rms_norm",
        "layer_norm",
        "fused_add_rms_norm",
    ),
    "gated_delta_output",
)
FEW = ("varlen_causal", "fused_add_rms_norm")


class _Called(Exception):
    pass


@pytest.mark.thorough
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", SPECS)
def test_every_call_finds_its_machine_code(name: str, arch: str, tmp_path: Path) -> None:
    text, sizes = SPECS[name]
    (tmp_path / f"{name}.yaml").write_text(text)
    loaded = load(tmp_path / f"{name}.yaml")
    folder = tmp_path / "generated" / name
    folder.mkdir(parents=True)
    for file, emitted in render_spec(loaded).items():
        (folder / file).write_text(emitted)
    options = BuildOptions([arch], sizes or {"gqa": (1,)}, jobs=2)
    (row,) = build_specs([loaded], tmp_path / "generated", tmp_path / "out", options)
    assert row["ok"], row["error"]
    lacking, launches = _lacking(loaded, tmp_path / "out" / name, int(arch[3:5]))
    assert launches > 20
    if loaded.spec.kernel == "chunk_output":
        lacking = {
            case: kernels for case, kernels in lacking.items() if case[1] not in OTHER_STRIDES
        }
    assert lacking == {}


@pytest.mark.parametrize(
    ("names", "arch", "least"),
    [
        pytest.param(FEW, "sm_90a", 100, id="few"),
        *(pytest.param(CHOSEN, arch, 1000, id=arch, marks=pytest.mark.thorough) for arch in ARCHS),
    ],
)
def test_a_launch_takes_what_was_compiled_for_it(
    names: tuple[str, ...], arch: str, least: int, tmp_path: Path
) -> None:
    """If several machine codes fit, the launch takes the one with most facts about the arguments.

    Its loads and stores are vectors.
    """
    specs = [f"specs/{name}.yaml" for name in names]
    done = python(
        ["tests/support/packages/chosen_code.py", str(tmp_path), arch, *specs],
        {"TRITON_INTERPRET": None},
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["launches"] > least
    assert said["others"] == []


def _lacking(loaded: Any, folder: Path, chip: int) -> tuple[dict[tuple[str, str], list[str]], int]:
    """Return the kernels without machine code by pass and case, and the number of launches."""
    package = package_of(f"called_{loaded.spec.name}", folder)
    launcher, problem = package.load("triton"), problem_of(loaded)
    family = family_of(problem)
    of_cases = importlib.import_module(f"kgen.kernels.{loaded.spec.kernel}.verify.cases")
    found: list[str | None] = []

    def launch(
        kernel: Any, grid: Any, *args: Any, enable_fp_fusion: bool = True, **meta: Any
    ) -> None:
        there = kernel._found(*kernel._told(args, meta), args)
        found.append(None if there else kernel.__name__)

    def called(call: Callable[[], Any], *args: Any, **kwargs: Any) -> None:
        call()
        raise _Called

    lacking, count = {}, 0
    with contextlib.ExitStack() as stack:
        for patch in (
            mock.patch.object(runtime.Kernel, "_launch", launch),
            mock.patch.object(runtime, "_arch", return_value=chip),
            mock.patch.object(compare, "careful", called),
            mock.patch("torch.cuda.current_device", return_value=0),
            mock.patch("torch.cuda.device_of", return_value=contextlib.nullcontext()),
            *(
                mock.patch.object(of_cases, name, return_value=(None, None))
                for name in ("references", "reference", "_references")
                if hasattr(of_cases, name)
            ),
            *_as_on(chip, launcher),
        ):
            stack.enter_context(patch)
        subject = Subject(problem, "triton", folder / "triton.py", launcher, "cpu")
        for group in family.groups(problem):
            for case in family.cases(problem, quick=False):
                found.clear()
                with contextlib.suppress(_Called):
                    family.run_case(subject, group, case.name)
                count += len(found)
                if missing := [name for name in found if name is not None]:
                    lacking[group, case.name] = missing
    return lacking, count


def _as_on(chip: int, launcher: Any) -> list[Any]:
    """Return patches that make a launcher see another chip."""
    modules = [launcher]
    if chip == 90 and hasattr(launcher, "_hopper"):
        modules.append(launcher._hopper())
    answers = {
        "_arch": chip,
        "_multiprocessors": 132,
        "_portable_because": "" if chip == 90 else "another chip",
    }
    return [
        mock.patch.object(module, name, return_value=answer)
        for module in modules
        for name, answer in answers.items()
        if hasattr(module, name)
    ]

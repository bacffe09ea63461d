"""Calls from C: results, error messages, compilers, and runs on a GPU if there is one."""

from __future__ import annotations

import ctypes
import math
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.interpreters.own_process import interpreted
from support.packages.c_calls import Case, attention_tensors
from support.packages.c_on_paper import Library, Paper, compiled, packages_of, run_example
from typer.testing import CliRunner

from kgen.build.package import BuildOptions, build_specs
from kgen.build.stale import stale
from kgen.cli import app
from kgen.family import family
from kgen.render.rendering import render_spec
from kgen.spec.load import load

ROOT = Path(__file__).resolve().parents[2]
INVALID, WORKSPACE, NO_KERNEL, DRIVER = 1, 2, 3, 4
AWKWARD = """kernel: attention
name: awkward
dtype: fp16
head_dim: 128
gqa: any
lengths: {q: any, kv: any}
buffers: {double: {shape: [HQ], dtype: fp32}}
params:
  register: {type: float, runtime: true}
  EOF: {type: float, runtime: true}
  NAME: {type: float, runtime: true}
mask_mod: q_idx >= kv_idx
score_mod: score * register + double[h] * (kv_idx - q_idx) + EOF - NAME
"""
"""Names that are keywords or macros in C and C++, and the name of a macro of the package."""
LEARNED = """kernel: attention
name: learned
dtype: fp16
head_dim: 16
gqa: any
lengths: {q: any, kv: any}
buffers:
  gain: {shape: [HQ], dtype: fp32, grad: true}
  near: {shape: [HQ, 16], dtype: fp32, grad: true}
  bias: {shape: [HQ, SQ, SK], dtype: fp32, grad: true}
  doc: {shape: [SQ], dtype: int32}
  table: {shape: [3, HQ], dtype: fp32, grad: true}
  columns: {shape: [8], dtype: fp32, grad: true}
  blend: {shape: [], dtype: any, grad: true}
score_mod: |
  far = near[h, min(abs(q_idx - kv_idx), 15)]
  once = score * gain[h] + gain[h // 2] * bias[h, q_idx, kv_idx] + far
  once + table[doc[q_idx], h] + (1 + blend) * columns[kv_idx % 8]
mask_mod: q_idx >= kv_idx
"""
"""Gradients of buffers in every form in which kernels store them."""
CACHE = """kernel: attention
name: cache
dtype: fp16
head_dim: {qk: 64, v: 32}
gqa: any
lengths: {q: any, kv: {per_batch: true}}
params: {window: 90}
score_mod: 20 * tanh(score / 20) + 0.01 * (kv_idx - q_idx)
mask_mod: q_idx >= kv_idx and q_idx - kv_idx < window
passes: [forward, decode]
"""
"""Few queries, so that the keys are split."""
PAGES = """kernel: attention
name: pages
dtype: fp16
head_dim: {qk: 64, v: 32}
gqa: 2
paged_kv: {page_size: 16}
mask_mod: q_idx >= kv_idx
passes: [decode]
"""
IMAGES = """kernel: attention
name: images
dtype: fp16
head_dim: 16
gqa: any
lengths: {q: any, kv: any}
buffers:
  image: {shape: [B, SQ], dtype: uint8}
  allowed: {shape: [HQ, 4, 4], dtype: bool}
mask_mod: |
  near = allowed[h, q_idx // 64, kv_idx // 64]
  q_idx >= kv_idx and near or image[b, q_idx] == image[b, kv_idx] + 1
passes: [forward, backward]
"""
"""A mask that needs a block mask."""
OUTPUTS = ("gated_delta_output", "gated_delta_output_varlen", "retention_output")
SPECS = {"awkward": AWKWARD, "pages": PAGES}
EXAMPLES = {"learned": LEARNED, "cache": CACHE, "images": IMAGES}
"""Specs whose examples run."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with fake machine code."""
    return packages_of(SPECS, tmp_path_factory.mktemp("calls"))


# --- numbers ------------------------


@pytest.mark.parametrize("layout", ["bshd", "guarded"])
def test_numbers_are_right(folder: Path, layout: str) -> None:
    """Triton's interpreter runs the launches from C, with the arguments in memory."""
    for name, error in interpreted(_errors, folder, layout).items():
        assert error < 4e-3, name


@pytest.mark.parametrize(
    ("name", "results"),
    [
        pytest.param("learned", 11, marks=pytest.mark.thorough),
        pytest.param("cache", 2, marks=pytest.mark.thorough),
        ("pages", 2),
        pytest.param("images", 5, marks=pytest.mark.thorough),
    ],
)
def test_the_example_is_right_on_paper(
    folder: Path, tmp_path: Path, name: str, results: int
) -> None:
    """The example makes the calls of a user's program in memory with garbage, and checks the
    results itself.
    """
    if name in EXAMPLES:
        folder = packages_of({name: EXAMPLES[name]}, tmp_path)
    done = run_example(folder / name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": right") == results


def _errors(folder: Path, layout: str) -> dict[str, float]:
    from kgen.build.runtime import triton as runtime
    from kgen.verify import interpreter

    interpreter.mend()
    package = runtime.Package("awkward_numbers", folder / "awkward")
    source = package.source("triton")
    memory: dict[int, int] = {}

    def view(address: int, kind: str) -> Any:
        dtype = {v: k for k, v in runtime.DTYPES.items()}[kind[1:]]
        end = next(e for b, e in memory.items() if b <= address < e)
        size = (end - address) // dtype.itemsize
        raw = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
        return torch.frombuffer(raw, dtype=dtype)

    def run(row: Any, programs: int, raw: dict[str, int]) -> None:
        if library.workspace.numel():
            begin = library.workspace.data_ptr()
            memory[begin] = begin + library.workspace.numel()
        given = {}
        for name, kind, value in row["arguments"]:
            found = value if kind == "constexpr" else raw[name]
            given[name] = view(found, kind) if kind.startswith("*") else found
        getattr(source, row["kernel"])[(programs,)](**given)

    paper, library = Paper(folder / "awkward", run), Library(folder / "awkward", "awkward")
    paper.device(80, 4)
    given = _drawn(folder, Case(heads=2, group=2, sq=70, sk=70, layout=layout, dlse=True))
    for x in given.values():
        if isinstance(x, torch.Tensor):
            storage = x.untyped_storage()
            memory[storage.data_ptr()] = storage.data_ptr() + storage.nbytes()
    paper.begin({})
    for pass_ in ("forward", "backward"):
        assert library.call(pass_, given) == 0, library.error()
    return _against(given)


def _drawn(folder: Path, case: Case) -> dict[str, Any]:
    """Return arguments of C with random values, and garbage in the outputs."""
    found = attention_tensors(load(folder / "awkward.yaml"), case)
    torch.manual_seed(0)
    for x in found.values():
        if isinstance(x, torch.Tensor):
            x.copy_(torch.randn(x.shape))
    found = {f"{n}_" if n in ("double", "register") else n: x for n, x in found.items()}
    found |= {f"d{n}": torch.full_like(found[n], 7.0) for n in "qkv"}
    return found | {
        "out": torch.full_like(found["q"], 7.0),
        "lse": torch.full(found["q"].shape[:-1], 7.0),
        "scale": 0.0,
    }


def _against(given: dict[str, Any]) -> dict[str, float]:
    """Return the error of each output, relative to its largest element."""
    q, k, v = (given[n].double().detach().clone().requires_grad_() for n in "qkv")
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT / math.sqrt(q.shape[-1]) * given["register_"]
    rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    scores = scores + given["double_"].double()[:, None, None] * (columns - rows)
    scores = scores.masked_fill(columns > rows, -torch.inf)
    out, lse = (
        scores.softmax(-1) @ v.repeat_interleave(group, 1),
        scores.logsumexp(-1) / math.log(2),
    )
    dq, dk, dv = torch.autograd.grad(
        [out, lse], [q, k, v], [given["dout"].double(), given["dlse"].double()]
    )
    want = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    return {
        name: float((given[name].double() - x).abs().max() / x.abs().max())
        for name, x in want.items()
    }


# --- what is wrong ------------------------


def test_what_is_wrong_is_said(folder: Path) -> None:
    paper, library = Paper(folder / "awkward"), Library(folder / "awkward", "awkward")
    paper.device(80, 4)
    given = _drawn(folder, Case(group=2))
    q, k, lse = given["q"], given["k"], given["lse"]

    def said(
        pass_: str = "backward", workspace: torch.Tensor | None = None, **more: Any
    ) -> tuple[int, str]:
        paper.begin({})
        room = torch.zeros(1 << 20, dtype=torch.uint8) if workspace is None else workspace
        return library.call(pass_, given | more, room), library.error().removeprefix("awkward: ")

    assert said()[0] == 0
    assert said(q=None) == (INVALID, "q must be [0, 0, 0, 128], got [0, 0, 0, 0]")
    assert said(k=k[:, :, 1:]) == (INVALID, "v must be [2, 2, 199, 128], got [2, 2, 200, 128]")
    assert said(q=q[:, :3]) == (
        INVALID,
        "q has 3 heads, which is not a multiple of the 2 heads of k and v",
    )
    assert said(double_=given["double_"][1:]) == (INVALID, "double must be [4], got [3]")
    assert said(double_=None) == (INVALID, "double must be [4], got [0]")
    assert said(lse=None) == (INVALID, "lse must be [2, 4, 200], got [0, 0, 0]")
    assert said(lse=torch.zeros(2, 4, 400)[..., ::2]) == (INVALID, "lse must be contiguous")
    assert said(dq=None)[1].startswith("dq must be [2, 4, 200, 128]")
    assert said(scale=-1.0)[1].startswith("scale must be positive")
    assert said(scale=math.nan)[1].startswith(
        "scale must be finite and must not underflow in float32"
    )
    assert said(register_=math.inf)[1].startswith(
        "register must be finite and must not underflow in float32"
    )
    needed = library.query("backward", given)
    small = torch.zeros(needed - 1, dtype=torch.uint8)
    assert said(workspace=small) == (
        WORKSPACE,
        f"the workspace must have {needed} bytes, got {needed - 1}",
    )
    assert said(workspace=torch.zeros(1 << 20, dtype=torch.uint8)[8:])[0] == WORKSPACE
    made = library.made(given)
    made.q.strides[2] = -128
    assert library.library.awkward_forward(ctypes.byref(made), None, 0, None) == INVALID
    assert library.error() == "awkward: strides of q may not be negative, got -128"
    made.q.strides[2], made.q.strides[3] = 128, 1 << 27
    assert library.library.awkward_forward(ctypes.byref(made), None, 0, None) == INVALID
    words = "the last stride of q is too large, got 134217728: make the tensor contiguous"
    assert library.error() == f"awkward: {words}"
    made = library.made(given)
    made.k.data = 0
    assert library.library.awkward_forward(ctypes.byref(made), None, 0, None) == INVALID
    assert library.error() == "awkward: k is NULL"
    made.k.data = k.data_ptr() + 1
    assert library.library.awkward_forward(ctypes.byref(made), None, 0, None) == INVALID
    assert library.error() == "awkward: k must be aligned to 2 bytes"
    made = library.made(given)
    for x in (made.q, made.k, made.v):
        x.sizes[0] = 1 << 47
    assert library.library.awkward_forward(ctypes.byref(made), None, 0, None) == INVALID
    assert library.error().endswith("has more than 2**48 elements")
    for x in (made.q, made.k, made.v):
        x.sizes[0], x.sizes[2] = 0, 2**63 - 1
    assert library.library.awkward_forward(ctypes.byref(made), None, 0, None) == INVALID
    made = library.made(given)
    made.v.sizes[2] = -1
    assert library.library.awkward_forward(ctypes.byref(made), None, 0, None) == INVALID
    assert library.error() == "awkward: v must be [2, 2, 200, 128], got [2, 2, -1, 128]"
    assert library.library.awkward_forward(None, None, 0, None) == INVALID
    assert library.query("backward", given | {"k": None}) == -1
    three = _drawn(folder, Case(group=3))
    assert library.call("forward", three) == NO_KERNEL
    assert "no machine code of _forward_kernel for sm_80 and these arguments" in library.error()
    paper.device(86, 4)
    for pass_ in ("forward", "backward"):
        assert said(pass_) == (
            NO_KERNEL,
            "no machine code for sm_86. Build it with `kgen build --arch`",
        )
    assert library.library.awkward_load() == NO_KERNEL
    paper.device(80, 4)
    paper.driver.paper_fail(700)
    assert said("forward") == (DRIVER, "cuLaunchKernelEx: on paper (700)")
    paper.driver.paper_fail(0)
    paper.driver.paper_context(None)
    words = "no CUDA context is current in this thread: call cudaSetDevice or cuCtxSetCurrent"
    assert said("forward") == (DRIVER, words)
    paper.driver.paper_context(1)
    assert said("forward", lse=lse)[0] == 0


def test_what_tma_cannot_reach_takes_portable_kernels(folder: Path) -> None:
    paper, library = Paper(folder / "awkward"), Library(folder / "awkward", "awkward")
    paper.device(90, 4)
    given = _drawn(folder, Case(group=2, sq=130, sk=130))

    def kernels(pass_: str, **more: Any) -> list[str]:
        paper.begin({})
        assert library.call(pass_, given | more) == 0, library.error()
        return [name for name, *_ in paper.events]

    assert kernels("forward") == ["zeros", "_forward_hopper_kernel"]
    odd = torch.zeros(2, 4, 130, 129, dtype=torch.float16)[..., :128]
    assert kernels("forward", out=odd) == ["_forward_kernel"]
    on_hopper = ["_dkdv_hopper_kernel", "_dq_hopper_kernel"]
    # TMA cannot load rows with a stride of 130 elements, so the launcher copies them.
    assert kernels("backward") == ["_delta_kernel", "copy", "copy", *on_hopper]
    portable = ["_delta_kernel", "_dq_kernel", "_dkdv_kernel"]
    assert kernels("backward", dout=odd) == portable
    assert (
        kernels("backward", dv=torch.zeros(2, 2, 130, 130, dtype=torch.float16)[..., :128])
        == portable
    )
    shifted = torch.zeros(2 * 4 * 130 + 1)[1:].view(2, 4, 130)
    assert kernels("backward", lse=shifted) == portable
    # The workspace is large enough for both kernels, so that one query per size is enough.
    assert library.query("forward", given | {"out": odd}) == library.query("forward", given)
    assert library.query("backward", given | {"dout": odd}) == library.query("backward", given)


def test_a_page_table_is_of_all_sequences_and_room_is_for_all_shares(folder: Path) -> None:
    paper, library = Paper(folder / "pages"), Library(folder / "pages", "pages")
    paper.device(80, 4)
    given = attention_tensors(load(folder / "pages.yaml"), Case(heads=2, sq=1, sk=200))
    given = {n: x for n, x in given.items() if hasattr(library.arguments, n)} | {
        "lse": torch.zeros(2, 4, 1)
    }
    given["out"] = torch.zeros(2, 4, 1, 32, dtype=torch.float16)

    def said(**more: Any) -> str:
        assert library.query("forward", given | more) == -1
        return library.error().removeprefix("pages: ")

    assert library.call("forward", given) == 0, library.error()
    assert said(block_table=given["block_table"][:1]) == "block_table must be [2, *], got [1, 13]"
    assert said(k=given["k"][:, :8]) == "k must be [27, 16, 2, 64], got [27, 8, 2, 64]"
    assert said(v=given["v"][1:]) == "v must be [27, 16, 2, 32], got [26, 16, 2, 32]"
    # 8 rows have 3 splits of 32 columns and a log-sum-exp each, because 12 programs run at once.
    assert library.query("forward", given) == 4 * 8 * 3 * (32 + 1)
    paper.device(86, 4)
    assert said() == "no machine code for sm_86. Build it with `kgen build --arch`"


def test_machine_code_is_loaded_once_for_a_context_and_messages_are_of_a_thread(
    folder: Path,
) -> None:
    paper, library = Paper(folder / "awkward"), Library(folder / "awkward", "awkward", cpp=True)
    paper.device(80, 4)
    given = _drawn(folder, Case(group=1))
    for _ in range(3):
        assert library.call("forward", given) == 0
    assert paper.loads == 1
    paper.driver.paper_context(2)
    assert library.call("forward", given) == 0
    assert paper.loads == 2
    paper.driver.paper_context(1)
    assert library.library.awkward_load() == 0
    of_chip = [row for row in paper.rows if row["capability"] == 80]
    assert paper.loads == 1 + len(of_chip)
    assert library.query("forward", given | {"scale": -1.0}) == -1
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(library.error()))
    thread.start()
    thread.join()
    assert elsewhere == [""]
    assert "scale" in library.error()


# --- compilers, and the command ------------------------


def test_cmake_builds_the_example_with_a_compiler_of_c_plus_plus_alone(
    folder: Path, tmp_path: Path
) -> None:
    _cmake(folder / "awkward" / "c", tmp_path)
    if not torch.cuda.is_available():
        done = subprocess.run(
            [tmp_path / "awkward_example"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 3
        assert done.stderr == "no CUDA driver: libcuda.so.1 was not found\n"


def _cmake(source: Path, build: Path) -> None:
    flags = "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror"
    compiled(["cmake", "-S", source, "-B", build, "-DCMAKE_C_COMPILER=/none", flags])
    compiled(["cmake", "--build", build])


def test_what_there_is_only_in_python_is_refused(tmp_path: Path) -> None:
    own = replace(family("chunk_output").targets["triton"], native=None)
    with mock.patch.dict(family("chunk_output").targets, {"triton": own}):
        done = CliRunner().invoke(
            app, ["build", "gated_delta_output", "--c", "-o", str(tmp_path / "out")]
        )
    assert done.exit_code == 2
    said = "`gated_delta_output` cannot be called from C: `chunk_output` has no launcher in C"
    assert said in done.output
    assert not (tmp_path / "out").exists()


def test_check_says_what_of_c_is_not_what_was_built(folder: Path) -> None:
    loaded = load(folder / "awkward.yaml")
    source = folder / "awkward" / "c" / "kgen_calls.h"
    text = source.read_text()
    try:
        source.write_text(text + "\n")
        assert "awkward: c/kgen_calls.h was edited after the build" in stale(
            [loaded], folder / "generated", folder
        )
    finally:
        source.write_text(text)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "name", ["causal_alibi", "varlen_causal", "gpt_oss", "layer_norm", *OUTPUTS]
)
def test_the_example_is_right_on_a_device(name: str, tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}{'a' * (major >= 9)}"
    loaded = load(ROOT / "specs" / f"{name}.yaml")
    for file, text in render_spec(loaded).items():
        path = tmp_path / "generated" / loaded.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    sizes = {"gqa": (2,), "batch": (1,), "width": (1024,), "heads": (8,)}
    (row,) = build_specs(
        [loaded], tmp_path / "generated", tmp_path, BuildOptions([arch], sizes, c=True)
    )
    assert row["ok"], row["error"]
    _cmake(tmp_path / name / "c", tmp_path / "build")
    done = subprocess.run(
        [tmp_path / "build" / f"{name}_example"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

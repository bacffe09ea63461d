"""The launch cache of emitted attention: layouts with the same properties reuse a compiled
kernel.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from triton._C import libtriton
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kgen.kernels.attention.verify.cases import differentiable
from kgen.kernels.attention.verify.inputs import call, draw
from kgen.spec.load import load
from kgen.verify.compile_triton import OfflineDriver
from kgen.verify.families import family_of, problem_of
from kgen.verify.toolchain import import_file

ROOT = Path(__file__).resolve().parents[3]
FILES = [p for p in sorted(ROOT.glob("generated/*/triton.py")) if "_launch(\n" in p.read_text()]
TRAINED = [p for p in FILES if "_compile_ahead(" in p.read_text()]


class _Kernel:
    """Stand-in for a kernel. It counts how often the launcher requests a compiled kernel."""

    def __init__(self) -> None:
        self.arg_names = ["x", "stride", "SIZE", "BLOCK"]
        self.asked = 0
        self.called: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def ask(*args: Any, **meta: Any) -> _Compiled:
            self.asked += 1
            return _Compiled(self)

        return ask


class _Compiled:
    def __init__(self, kernel: _Kernel) -> None:
        self.kernel, self.loaded = kernel, False

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        self.loaded = True  # Triton loads the kernel lazily
        return lambda *args: self.kernel.called.append((grid, *args))


@pytest.fixture(scope="module")
def emitted() -> Any:
    return import_file(ROOT / "generated" / "causal" / "triton.py", "kgen_test_launches")


def _launch(
    emitted: Any, kernel: _Kernel, x: torch.Tensor, BLOCK: int = 64, programs: int = 3
) -> None:
    layouts = emitted._layouts(x, None)
    emitted._launch(kernel, programs, layouts, x, x.stride(0), len(x), BLOCK=BLOCK, num_warps=4)


def test_a_kernel_is_asked_once_for_the_same_layouts(emitted):
    kernel, x = _Kernel(), torch.zeros(8, 16)
    _launch(emitted, kernel, x)
    _launch(emitted, kernel, x)
    longer = torch.zeros(9, 16)
    _launch(emitted, kernel, longer)  # sizes are not part of the key
    assert kernel.asked == 1
    assert kernel.called == [((3, 1, 1), x, 16, 8, 64), ((3, 1, 1), longer, 16, 9, 64)]


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(8, 17)[:, :16],
        torch.zeros(8, 16, dtype=torch.bfloat16),
        torch.zeros(129)[1:].view(8, 16),
        torch.zeros(8, 16, device="meta"),
    ],
    ids=["strides", "dtype", "alignment", "device"],
)
def test_a_kernel_is_asked_again_for_other_layouts(emitted, other):
    kernel = _Kernel()
    _launch(emitted, kernel, torch.zeros(8, 16))
    _launch(emitted, kernel, other)
    assert kernel.asked == 2


def test_a_kernel_is_asked_again_for_other_constants(emitted):
    kernel, x = _Kernel(), torch.zeros(8, 16)
    _launch(emitted, kernel, x, BLOCK=64)
    _launch(emitted, kernel, x, BLOCK=32)
    assert kernel.asked == 2


def test_nothing_is_compiled_or_launched_for_no_programs(emitted, monkeypatch):
    kernel, x = _Kernel(), torch.zeros(0, 16)
    _launch(emitted, kernel, x, programs=0)
    assert not kernel.asked
    package = sys.modules[emitted._launch.__module__]
    monkeypatch.setattr(package, "_AHEAD", ahead := {})
    emitted._compile_ahead(_launch, emitted, kernel, x, 64, 0)
    assert not ahead
    _launch(emitted, kernel, x)
    _launch(emitted, kernel, x, programs=0)
    assert kernel.asked == 1
    assert not kernel.called


def test_a_cache_that_grows_finds_its_kernels(emitted):
    """If keys are concatenated token by token, strides change in each step, but Triton's kernel
    stays the same.
    """
    kernel = _Kernel()
    for length in range(2, 40):
        _launch(emitted, kernel, torch.zeros(4, length, 16).transpose(0, 1))
    assert kernel.asked == 1


STRIDES = [0, 1, 2, 15, 16, 17, 32, 4096, 2**31 - 1, 2**31, 2**31 + 1, 2**40, 2**40 + 1]


@pytest.mark.skipif(
    not hasattr(libtriton, "native_specialize_impl"), reason="Triton has it since 3.5"
)
def test_kinds_of_strides_are_those_that_triton_compiles_for(emitted):
    kinds = {stride: sys.modules["kgen_test_launches._launch"]._kinds(stride) for stride in STRIDES}
    compiled = {
        stride: libtriton.native_specialize_impl(CUDABackend, stride, False, True, True)
        for stride in STRIDES
    }
    for a in STRIDES:
        for b in STRIDES:
            assert (kinds[a] == kinds[b]) == (compiled[a] == compiled[b]), (a, b)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("path", TRAINED, ids=lambda path: path.parent.name)
def test_the_backward_pass_finds_what_was_compiled_ahead(path, capability, monkeypatch):
    """Threads compile exactly the backward kernels while the first forward pass compiles.

    No kernel is launched twice. If no gradient is required, nothing is compiled early.
    """
    module = import_file(path, f"kgen_test_ahead_{path.parent.name}")
    launching = sys.modules[f"{module.__package__}._launch"]
    problem = problem_of(load(ROOT / "specs" / f"{path.parent.name}.yaml"))
    (_, compile_calls), *_ = family_of(problem).compile_calls(problem)
    ran: list[tuple[str, bool]] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **meta: Any) -> _Compiled:
        ran.append((kernel.fn.__name__, warmup))
        compiled = _Compiled(_Kernel())
        if warmup:
            made_ahead.append(compiled)
        return compiled

    def compile_ahead(*args: Any) -> None:
        plain(*args)
        ahead.append({*launching._AHEAD})

    made_ahead: list[_Compiled] = []
    ahead: list[set[Any]] = []
    plain = module._compile_ahead
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(driver, "_active", OfflineDriver(capability))
    monkeypatch.setattr(module, "_arch", lambda device: capability)
    monkeypatch.setattr(module, "_compile_ahead", compile_ahead)
    function, inputs = getattr(module, problem.name), draw(problem, compile_calls.args[1], "cpu")
    wanted = list(differentiable(problem, inputs).values())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    for value in wanted:
        value.requires_grad_(False)
    call(function, inputs, return_lse=True)
    assert not ahead
    ran.clear()
    module._COMPILED.clear()
    for value in wanted:
        value.requires_grad_()
    torch.autograd.grad(call(function, inputs), wanted, inputs.dout)
    (keys,) = ahead
    assert keys
    assert keys <= module._COMPILED.keys()
    assert not launching._AHEAD, "what was compiled ahead was not launched"
    warm = [name for name, warmup in ran if warmup]
    launched = [name for name, warmup in ran if not warmup]
    assert sorted(warm) == sorted(launched[-len(warm) :])
    assert all(compiled.loaded for compiled in made_ahead)
    assert len(launched) > len(warm)
    torch.autograd.grad(call(function, inputs), wanted, inputs.dout)
    assert ahead == [keys], "the second call compiled ahead"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_kernels_are_compiled_for_nothing_else(path):
    """Triton specializes only on strides and constants, because a launch key contains no other
    numbers.
    """
    module = import_file(path, f"kgen_test_launches_{path.parent.name}")
    launcher = path.read_text().split("# --- launch")[1]
    kernels = {
        name: kernel for name, kernel in vars(module).items() if isinstance(kernel, JITFunction)
    }
    launched = [kernel for name, kernel in kernels.items() if f" {name}, " in launcher]
    assert launched
    for kernel in launched:
        for param in kernel.params:
            if (
                param.is_constexpr
                or param.do_not_specialize
                or param.name.endswith("_ptr")
                or "_desc" in param.name
            ):
                continue
            assert param.name.startswith("stride_") or param.name == "scale", (
                f"{kernel.fn.__name__}: {param.name}"
            )

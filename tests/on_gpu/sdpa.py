"""`scripts/sdpa`: scaled_dot_product_attention and varlen_attn on a GPU with registered kernels.

The script renders a package for PyTorch, registers it, and prints one line for each check. Exit 1
if a check fails.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from kgen.kernels.attention.adapt import transformers as models
from kgen.kernels.attention.adapt.flash import torch_package
from kgen.render.adapters import Adapter
from kgen.spec.load import loads_variants

HEAD = "kernel: attention\ndtype: bf16\nhead_dim: 128\ngqa: any\n"
CAUSAL = f"{HEAD}name: causal_any\nmask_mod: q_idx >= kv_idx\n"
END = "q_idx + SK - SQ"
SPECS = (
    CAUSAL,
    f"{HEAD}name: full_any\n",
    f"{HEAD}name: packed_any\nvarlen: true\nmask_mod: {END} >= kv_idx\n",
    f"{HEAD}name: packed_window\nvarlen: true\n"
    f"mask_mod: {END} >= kv_idx and {END} - kv_idx < 200\n",
)
NAME = "on_gpu"
CHECKS: list[Callable[[Context], str | None]] = []
BF16 = 2e-2
"""Tolerance relative to the largest element. PyTorch's own kernels have about a third of it."""


class Context:
    """The package, and results of PyTorch's own kernels before the registration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        written(torch_package([loads_variants(text, "gpu.yaml") for text in SPECS], NAME), folder)
        written(models.adapter(loads_variants(CAUSAL, "gpu.yaml")), folder)
        sys.path.insert(0, str(folder))
        self.package: ModuleType = importlib.import_module(f"{NAME}_torch")
        self.theirs = {name: attempted(call) for name, call in OTHERS.items()}
        self.theirs["after"] = F.scaled_dot_product_attention(*tensors(), is_causal=True)
        self.chosen = torch._C._get_sdp_priority_order()

    def kernels(self, name: str) -> Any:
        """Return the function of a spec."""
        return getattr(importlib.import_module(f"{NAME}_torch.{name}"), name)

    def own(self, name: str, *given: Tensor) -> Tensor:
        """Return the output of the function of a spec."""
        out, _ = self.kernels(name)(*given, return_lse=True)
        return out


def attempted(call: Callable[[], Tensor]) -> Tensor | None:
    """Return the result of a call, or None if this PyTorch cannot compute it on this GPU."""
    try:
        return call()
    except (RuntimeError, TypeError) as error:
        print(f"not available: {type(error).__name__}: {error}"[:200])
        return None


def written(made: Adapter, folder: Path) -> None:
    for inner, files in made.folders.items():
        (folder / inner).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / inner / name).write_text(content)


def check(function: Callable[[Context], str | None]) -> Callable[[Context], str | None]:
    CHECKS.append(function)
    return function


def tensors(
    heads: int = 4, kv_heads: int = 4, queries: int = 777, keys: int = 777, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v [B, H, S, D] with the memory order of models: [B, S, H, D]."""
    torch.manual_seed(0)
    dtype, dim = options.get("dtype", torch.bfloat16), options.get("dim", 128)
    sizes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    found = [torch.randn(2, n, h, dim, device="cuda").to(dtype).transpose(1, 2) for n, h in sizes]
    return found[0], found[1], found[2]


def reference(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: float = math.inf
) -> tuple[Tensor, Tensor]:
    """Return out and lse in float64. The last query has the position of the last key."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    sq, sk = scores.shape[-2:]
    rows = torch.arange(sq, device="cuda")[:, None] + sk - sq
    before = rows - torch.arange(sk, device="cuda")
    hidden = (before < 0) & causal | (before > window)
    scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def with_gradients(call: Callable[..., Tensor], *given: Tensor) -> list[Tensor]:
    """Return the output and the gradients."""
    leaves = [x.detach().requires_grad_() for x in given]
    out = call(*leaves)
    torch.manual_seed(1)
    out.backward(torch.randn(out.shape, device="cuda").to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def apart(found: list[Tensor], wanted: list[Tensor], tolerance: float = BF16) -> str:
    assert len(found) == len(wanted)
    errors = [
        float((a.double() - b.double()).abs().max() / b.double().abs().max())
        for a, b in zip(found, wanted, strict=True)
    ]
    said = ", ".join(f"{error:.1e}" for error in errors)
    assert all(error < tolerance for error in errors), f"errors {said}, at most {tolerance}"
    return f"errors {said}"


def same(found: Tensor, wanted: Tensor) -> None:
    """Require equal bits: the forward kernels are deterministic."""
    assert torch.equal(found, wanted), "other bits: other kernels ran"


# --- calls that stay PyTorch's ------------------------


def masked() -> Tensor:
    mask = torch.ones(777, 777, dtype=torch.bool, device="cuda").tril()
    return F.scaled_dot_product_attention(*tensors(), attn_mask=mask)


def packed(*given: Tensor, window: tuple[int, int] = (-1, 0)) -> Any:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    cum = torch.tensor([0, 300, 301, 777], dtype=torch.int32, device="cuda")
    more: dict[str, Any] = {"return_aux": AuxRequest(lse=True)}
    if "window_size" in inspect.signature(varlen_attn).parameters:
        more["window_size"] = window
    elif window == (-1, 0):
        more["is_causal"] = True
    else:
        raise TypeError("varlen_attn of this torch has no window_size")
    return varlen_attn(*given, cum, cum, 476, 476, **more)


def in_a_pack(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)


def lower_right() -> Tensor:
    from torch.nn.attention.bias import causal_lower_right

    bias = causal_lower_right(100, 777)
    return F.scaled_dot_product_attention(*tensors(queries=100), attn_mask=bias)


def flash_alone(**options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(*tensors(**options), is_causal=True)


def cudnn() -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(*tensors(), is_causal=True)


OTHERS: dict[str, Callable[[], Tensor]] = {
    "a mask": masked,
    "float16": lambda: flash_alone(dtype=torch.float16),
    "heads of 64": lambda: flash_alone(dim=64),
    "fewer queries, causal from the end": lower_right,
    "another window of packed sequences": lambda: packed(
        *map(in_a_pack, tensors()), window=(50, 0)
    )[0],
    "the cuDNN backend": cudnn,
}


# --- checks, in order ------------------------


@check
def importing_changes_nothing(at: Context) -> None:
    assert attention.current_flash_attention_impl() is None
    assert NAME not in attention.list_flash_attention_impls()


@check
def register_activates_the_kernels_and_puts_flash_first(at: Context) -> str:
    at.package.register()
    assert attention.current_flash_attention_impl() == NAME
    order = torch._C._get_sdp_priority_order()
    assert order[0] == int(SDPBackend.FLASH_ATTENTION)
    return f"order {at.chosen} -> {order}"


@check
def sdpa_runs_the_causal_kernels(at: Context) -> None:
    q, k, v = tensors()
    assert at.package.explain(q, k, v, is_causal=True) == "causal_any"
    same(F.scaled_dot_product_attention(q, k, v, is_causal=True), at.own("causal_any", q, k, v))


@check
def sdpa_forward_and_backward_causal(at: Context) -> str:
    given = tensors()
    found = with_gradients(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), *given)
    assert all(x.stride() == y.stride() for x, y in zip(found, (given[0], *given), strict=True))
    doubles = [x.double() for x in given]
    return apart(found, with_gradients(lambda *x: reference(*x, causal=True)[0], *doubles))


@check
def sdpa_forward_and_backward_full_grouped(at: Context) -> str:
    given = tensors(heads=8, kv_heads=2, queries=500)
    found = with_gradients(lambda *x: F.scaled_dot_product_attention(*x, enable_gqa=True), *given)
    same(found[0], at.own("full_any", *given))
    doubles = [x.double() for x in given]
    return apart(found, with_gradients(lambda *x: reference(*x, causal=False)[0], *doubles))


@check
def sdpa_of_a_contiguous_layout(at: Context) -> str:
    given = [x.contiguous() for x in tensors()]
    found = with_gradients(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), *given)
    assert all(x.is_contiguous() for x in found)
    doubles = [x.double() for x in given]
    return apart(found, with_gradients(lambda *x: reference(*x, causal=True)[0], *doubles))


@check
def slices_of_one_projection_are_not_copied(at: Context) -> str:
    qkv = torch.randn(2, 4096, 3, 8, 128, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    added = torch.cuda.max_memory_allocated() - before
    size = out.numel() * out.element_size()
    assert added < 1.2 * size, f"{added} bytes for an output of {size}"
    same(out, at.own("causal_any", q, k, v))
    return f"{added / size:.2f} times the memory of the output"


@check
def the_operator_returns_the_natural_log_sum_exp(at: Context) -> str:
    q, k, v = tensors()
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    return apart([out, lse], [*reference(q, k, v, causal=True)])


@check
def autocast_runs_the_kernels(at: Context) -> str:
    given = [x.float() for x in tensors()]

    def call(*x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return F.scaled_dot_product_attention(*x, is_causal=True)

    found = with_gradients(call, *given)
    same(found[0], at.own("causal_any", *tensors()))
    assert {x.dtype for x in found[1:]} == {torch.float32}
    doubles = [x.double() for x in given]
    return apart(found, with_gradients(lambda *x: reference(*x, causal=True)[0], *doubles))


@check
def varlen_attn_causal(at: Context) -> str:
    given = [in_a_pack(x) for x in tensors()]
    found = packed_check(at, given, "packed_any", (-1, 0), math.inf)
    own = with_gradients(lambda *x: packed(*x)[0], *given)
    return f"{found}; {apart(own, with_gradients(by_sequence, *[x.double() for x in given]))}"


@check
def varlen_attn_window(at: Context) -> str:
    given = [in_a_pack(x) for x in tensors()]
    return packed_check(at, given, "packed_window", (199, 0), 199)


def by_sequence(*given: Tensor, width: float = math.inf) -> Tensor:
    """Return the output of packed sequences in float64."""
    parts = [
        reference(*(x[a:b].transpose(0, 1)[None] for x in given), causal=True, window=width)[0]
        for a, b in ((0, 300), (300, 301), (301, 777))
    ]
    return torch.cat([part[0].transpose(0, 1) for part in parts])


def packed_check(
    at: Context, given: list[Tensor], name: str, window: tuple[int, int], width: float
) -> str:
    cum = torch.tensor([0, 300, 301, 777], dtype=torch.int32, device="cuda")
    own, own_lse = at.kernels(name)(*given, cum, cum, return_lse=True)
    out, lse = packed(*given, window=window)
    same(out, own)
    assert torch.allclose(lse, own_lse)
    return apart([out], [by_sequence(*[x.double() for x in given], width=width)])


@check
def torch_compile_of_forward_and_backward(at: Context) -> str:
    given = tensors()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(2 * q, k, v, is_causal=True).relu()

    eager = with_gradients(layer, *given)
    torch._dynamo.reset()
    found = with_gradients(torch.compile(layer, fullgraph=True), *given)
    return apart(found, eager, 1e-2)


@check
def a_cuda_graph_replays(at: Context) -> None:
    q, k, v = tensors()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    q.copy_(torch.randn_like(q))
    graph.replay()
    same(out, at.own("causal_any", q, k, v))


@check
def deterministic_algorithms_give_the_same_bits(at: Context) -> None:
    given = tensors(queries=3000, keys=3000)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first, second = (
            with_gradients(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), *given)
            for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(first, second, strict=True):
        same(a, b)


@check
def dropout_is_that_of_pytorch(at: Context) -> None:
    given = tensors()
    calls = []
    for _ in range(2):
        torch.manual_seed(5)
        calls.append(
            with_gradients(
                lambda *x: F.scaled_dot_product_attention(*x, is_causal=True, dropout_p=0.5), *given
            )
        )
    same(calls[0][0], calls[1][0])
    exact = reference(*given, causal=True)[0]
    dropped = (calls[0][0].double() - exact).abs().mean() / exact.abs().mean()
    assert float(dropped) > 0.3, "nothing is dropped"


@check
def other_calls_have_the_results_of_before(at: Context) -> str:
    for name, call in OTHERS.items():
        wanted = at.theirs[name]
        if wanted is not None:
            apart([call()], [wanted], 1e-3)
    missing = [name for name in OTHERS if at.theirs[name] is None]
    return f"{', '.join(OTHERS)}" + (f"; not available: {', '.join(missing)}" if missing else "")


@check
def a_step_takes_as_long_as_with_the_functions(at: Context) -> str:
    given = [x.requires_grad_() for x in tensors(heads=16, kv_heads=16, queries=4096, keys=4096)]
    dout = torch.randn_like(given[0])
    own = at.kernels("causal_any")
    times = {
        "registered": timed(
            lambda: F.scaled_dot_product_attention(*given, is_causal=True).backward(dout)
        ),
        "function": timed(lambda: own(*given).backward(dout)),
    }
    return figures(times, "registered", "function")


@check
def a_llama_has_the_loss_and_the_step_of_the_adapter(at: Context) -> str:
    try:
        import transformers
    except ImportError:
        return "not run: transformers is not installed"
    importlib.import_module("causal_any_transformers")
    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=2048,
        intermediate_size=4096,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).cuda()
    tokens = torch.randint(0, 8192, (2, 4096), device="cuda")
    losses, times = {}, {}
    for name in ("sdpa", "causal_any"):
        model.set_attn_implementation(name)
        losses[name] = float(model(tokens, labels=tokens).loss.detach())

        def step() -> None:
            model.zero_grad()
            model(tokens, labels=tokens).loss.backward()

        times[name] = timed(step)
    assert abs(losses["sdpa"] - losses["causal_any"]) < 1e-3 * losses["sdpa"], losses
    return f"losses {losses}; {figures(times, 'sdpa', 'causal_any')}"


def timed(call: Callable[[], Any], runs: int = 12) -> float:
    """Return the median milliseconds of a call."""
    times = []
    for _ in range(runs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[2:])[len(times[2:]) // 2]


def figures(times: dict[str, float], own: str, other: str) -> str:
    said = ", ".join(f"{name} {ms:.2f} ms" for name, ms in times.items())
    assert times[own] < 1.1 * times[other], f"{said}: more than 1.1 times"
    return said


EARLY = f"""
import torch
import {NAME}_torch as package

package.register()
assert not torch.cuda.is_initialized()
q = torch.randn(1, 2, 300, 128, device="cuda", dtype=torch.bfloat16)
out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
own, _ = package.causal_any.causal_any(q, q, q, return_lse=True)
assert torch.equal(out, own), "other kernels ran"
"""


@check
def a_process_can_register_before_it_uses_cuda(at: Context) -> None:
    env = os.environ | {"PYTHONPATH": str(at.folder)}
    run = subprocess.run(
        [sys.executable, "-c", EARLY], env=env, capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr[-400:]


@check
def unregister_restores_pytorch(at: Context) -> None:
    at.package.unregister()
    assert attention.current_flash_attention_impl() is None
    assert torch._C._get_sdp_priority_order() == at.chosen
    same(F.scaled_dot_product_attention(*tensors(), is_causal=True), at.theirs["after"])


@check
def it_can_be_registered_again(at: Context) -> None:
    at.package.register()
    q, k, v = tensors()
    same(F.scaled_dot_product_attention(q, k, v, is_causal=True), at.own("causal_any", q, k, v))
    at.package.unregister()


@contextlib.contextmanager
def reported(name: str, failed: list[str]) -> Iterator[list[str]]:
    """Print a line for a check."""
    begin, said = time.perf_counter(), [""]
    try:
        yield said
    except Exception as error:
        failed.append(name)
        said[0] = f"{type(error).__name__}: {error}".replace("\n", " ")[:600]
        traceback.print_exc()
    word = "FAILED" if name in failed else "ok"
    seconds = time.perf_counter() - begin
    print(f"{word}: {name.replace('_', ' ')} ({seconds:.1f} s) {said[0]}".rstrip(), flush=True)


def main() -> int:
    """Run all checks. Return the exit code."""
    if not torch.cuda.is_available():
        print("there is no GPU")
        return 2
    import triton

    device = torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, triton {triton.__version__}, {device}", flush=True)
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        at = Context(Path(folder))
        for function in CHECKS:
            with reported(function.__name__, failed) as said:
                said[0] = function(at) or ""
    print(f"{len(CHECKS)} checks, {len(failed)} failed")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())

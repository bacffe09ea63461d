"""PyTorch's flash operators with emitted kernels: results, gradients, and PyTorch's own calls.

PyTorch has these operators only for GPUs. So the tests define them for the CPU first, as a
recorder, and register the kernels for the CPU too. `scaled_dot_product_attention` itself chooses
them only on a GPU: `tests/on_gpu/sdpa.py` runs it there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from exact_windows import (
    apart,
    gradients,
    imported,
    loaded,
    offsets,
    packed_reference,
    reference,
    run_example,
    spec,
    written,
)
from support.interpreters.own_process import interpreted
from torch import Tensor
from torch.nn import attention

from kgen.kernels.attention.adapt.flash import torch_package

WINDOW = "mask_mod: q_idx + SK - SQ >= kv_idx and q_idx + SK - SQ - kv_idx < 6"
SPECS = (
    spec("start", "mask_mod: q_idx >= kv_idx"),
    spec("whole", "gqa: any"),
    spec("window", WINDOW),
    spec("forward_only", "gqa: 4\nmask_mod: q_idx >= kv_idx\npasses: [forward]"),
    spec("packed", "varlen: true\ngqa: any\nmask_mod: q_idx + SK - SQ >= kv_idx"),
    spec("packed_window", f"varlen: true\n{WINDOW}"),
    spec("packed_start", "varlen: true\nmask_mod: q_idx >= kv_idx and q_idx - kv_idx < 4"),
)
OPERATORS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    "_flash_attention_forward",
    "_flash_attention_backward",
)
HALF = 4e-3
"""Tolerance for float16, relative to the largest element."""


class PyTorch:
    """Stand-ins for PyTorch's kernels on the CPU. `calls` records their names."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.library = torch.library.Library("aten", "IMPL", "CPU")
        for name in OPERATORS:
            self.library.impl(name, functools.partial(self.call, name), "CPU")

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        self.calls.append(name)
        if "backward" in name:
            return tuple(torch.zeros_like(x) for x in args[1:4])
        q, k = args[:2]
        lse, seed = q.new_empty(q.shape[:-1], dtype=torch.float32), torch.empty(2)
        out = torch.zeros_like(q)
        if name == "_flash_attention_forward":
            return out, lse, seed, seed, seed
        return out, lse, None, None, q.shape[2], k.shape[2], seed, seed, seed


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("torch")
    written(torch_package(loaded(*SPECS), "own"), folder)
    return folder


def registered(folder: Path) -> tuple[ModuleType, PyTorch]:
    theirs, own = PyTorch(), imported(folder, "own_torch")
    own.register(device="cpu")
    return own, theirs


def sdpa(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, *args, **options)


def drawn(*shape: int, heads_after: bool = False) -> Tensor:
    """Return a [B, H, S, D] tensor. With `heads_after`, its memory is [B, S, H, D]."""
    if heads_after:
        return drawn(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)
    return torch.randn(shape).half()


def kept_order(x: Tensor, like: Tensor) -> bool:
    """True if a tensor has the strides of torch.empty_like, except along axes of one element."""
    sizes = zip(x.shape, x.stride(), torch.empty_like(like).stride(), strict=True)
    return all(size == 1 or a == b for size, a, b in sizes)


DENSE: dict[str, tuple[tuple[int, int, int, int], bool, dict[str, Any], tuple[int, int]]] = {
    "causal": ((2, 2, 40, 40), True, {}, (-1, 0)),
    "a scale": ((2, 2, 33, 33), True, {"scale": 0.4}, (-1, 0)),
    "full": ((2, 2, 24, 40), False, {}, (-1, -1)),
    "grouped": ((4, 2, 24, 40), False, {}, (-1, -1)),
    "one query": ((4, 1, 1, 40), True, {}, (-1, -1)),
}
"""Numbers of heads, key heads, queries and keys; is_causal; options; the window that this means."""


@pytest.mark.parametrize("transposed", [False, True], ids=["by heads", "by tokens"])
def test_attention_is_that_of_the_reference(package: Path, transposed: bool) -> None:
    for name, error in interpreted(_dense, package, transposed).items():
        assert error < HALF, name


def _dense(folder: Path, transposed: bool) -> dict[str, float]:
    _, theirs = registered(folder)
    found = {}
    for name, ((h, hk, sq, sk), causal, options, window) in DENSE.items():
        torch.manual_seed(0)
        q = drawn(2, h, sq, 16, heads_after=transposed)
        k, v = (drawn(2, hk, sk, 16, heads_after=transposed) for _ in range(2))
        dout = drawn(2, h, sq, 16)
        out, lse, *_ = sdpa(q, k, v, 0.0, causal, **options)
        assert kept_order(out, q)
        exact = functools.partial(reference, window=window, **options)
        found[name] = apart((out, lse), exact(q, k, v))
        own = gradients(lambda *x, c=causal, o=options: sdpa(*x, 0.0, c, **o)[0], (q, k, v), dout)
        assert all(map(kept_order, own, (q, k, v)))
        wanted = gradients(lambda *x, f=exact: f(*x)[0], [x.double() for x in (q, k, v)], dout)
        found[f"gradients, {name}"] = apart(own, wanted)
    assert theirs.calls == []
    return found


LENGTHS = [(9, 9), (1, 30), (20, 4), (0, 7), (30, 33)]
PACKED: dict[str, tuple[int, tuple[int, int]]] = {
    "causal": (2, (-1, 0)),
    "grouped": (1, (-1, 0)),
    "window": (2, (5, 0)),
}
"""The number of key heads of two heads, and the window."""


def test_varlen_attn_is_that_of_the_reference(package: Path) -> None:
    for name, error in interpreted(_packed, package).items():
        assert error < HALF, name


def _packed(folder: Path) -> dict[str, float]:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    _, theirs = registered(folder)
    cum_q, cum_k = (offsets([pair[side] for pair in LENGTHS]) for side in (0, 1))
    found = {}
    for name, (kv_heads, window) in PACKED.items():
        torch.manual_seed(0)
        q = torch.randn(int(cum_q[-1]), 2, 16).half()
        k, v = (torch.randn(int(cum_k[-1]), kv_heads, 16).half() for _ in range(2))
        call = functools.partial(
            varlen_attn,
            cu_seq_q=cum_q,
            cu_seq_k=cum_k,
            max_q=30,
            max_k=33,
            window_size=window,
            enable_gqa=kv_heads != 2,
        )
        exact = functools.partial(packed_reference, lengths=LENGTHS, window=window)
        found[name] = apart(call(q, k, v, return_aux=AuxRequest(lse=True)), exact(q, k, v))
        dout = torch.randn_like(q)
        wanted = gradients(lambda *x, f=exact: f(*x)[0], [x.double() for x in (q, k, v)], dout)
        found[f"gradients, {name}"] = apart(gradients(call, (q, k, v), dout), wanted)
        whole = torch.compile(call, backend="aot_eager", fullgraph=True)
        found[f"compiled, {name}"] = apart(gradients(whole, (q, k, v), dout), wanted)
    assert theirs.calls == []
    return found


def test_the_operator_below_takes_windows_of_dense_tensors(package: Path) -> None:
    assert interpreted(_window, package) < HALF


def _window(folder: Path) -> float:
    _, theirs = registered(folder)
    q, k, v = (torch.randn(2, n, 2, 16).half() for n in (20, 33, 33))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        flash = torch.ops.aten._flash_attention_forward
        more = {"window_size_left": 5, "window_size_right": 0}
        return flash(q, k, v, None, None, 20, 33, 0.0, False, False, **more)

    def exact(*tensors: Tensor) -> Any:
        out, lse = reference(*(x.transpose(1, 2) for x in tensors), window=(5, 0))
        return out.transpose(1, 2), lse

    found = apart(call(q, k, v)[:2], exact(q, k, v))
    dout, leaves = torch.randn_like(q), [x.double() for x in (q, k, v)]
    own = gradients(lambda *x: call(*x)[0], (q, k, v), dout)
    assert theirs.calls == []
    return max(found, apart(own, gradients(lambda *x: exact(*x)[0], leaves, dout)))


def tokens(n: int, *, heads: int = 2, dtype: torch.dtype = torch.float16, dim: int = 16) -> Tensor:
    return torch.randn(1, heads, n, dim).to(dtype)


def flash(q: Tensor, *args: Any, **options: Any) -> Any:
    call = torch.ops.aten._flash_attention_forward
    return call(q, q, q, None, None, q.shape[1], q.shape[1], *args, **options)


def packed(q: Tensor, cum: Tensor, keys: Tensor | None = None, **options: Any) -> Any:
    call = torch.ops.aten._flash_attention_forward
    return call(q, q, q, cum, cum if keys is None else keys, 9, 9, 0.0, True, False, **options)


THEIRS: dict[str, Callable[[], Any]] = {
    "dropout": lambda: sdpa(tokens(9), tokens(9), tokens(9), 0.1, True),
    "a debug mask": lambda: sdpa(tokens(9), tokens(9), tokens(9), 0.0, True, True),
    "another dtype": lambda: sdpa(*[tokens(9, dtype=torch.bfloat16)] * 3, 0.0, True),
    "another head dim": lambda: sdpa(*[tokens(9, dim=32)] * 3, 0.0, True),
    "other groups": lambda: sdpa(tokens(9, heads=6), *[tokens(9)] * 2, 0.0, True),
    "more keys, and the spec has the first query at the first key": lambda: sdpa(
        tokens(9), tokens(12), tokens(12), 0.0, True
    ),
    "a negative scale": lambda: sdpa(*[tokens(9)] * 3, 0.0, True, scale=-1.0),
    "another order of memory": lambda: sdpa(
        *[torch.randn(9, 2, 2, 16).half().permute(1, 2, 0, 3)] * 3, 0.0, True
    ),
    "a window": lambda: flash(torch.randn(1, 9, 2, 16).half(), 0.0, False, False,
                              window_size_left=3),
    "ALiBi": lambda: flash(torch.randn(1, 9, 2, 16).half(), 0.0, True, False,
                           alibi_slopes=torch.ones(2)),
    "lengths of a cache": lambda: flash(torch.randn(1, 9, 2, 16).half(), 0.0, True, False,
                                        seqused_k=torch.ones(1, dtype=torch.int32)),
    "splits": lambda: packed(torch.randn(9, 2, 16).half(), offsets([9]), num_splits=1),
    "other lengths of keys, and the spec has the first query at the first key": lambda: packed(
        torch.randn(9, 2, 16).half(), offsets([5, 4]), offsets([4, 5]), window_size_left=3
    ),
    "offsets of 64 bits": lambda: packed(torch.randn(9, 2, 16).half(), offsets([9]).long()),
}  # fmt: skip
"""Calls that no kernels compute."""


def test_other_calls_are_those_of_pytorch(package: Path) -> None:
    found = interpreted(_others, package)
    assert len(found) == len(THEIRS) + 1
    assert {name: calls for name, calls in found.items() if len(calls) != 1} == {}
    # The kernels have no backward pass, so PyTorch computes it from their log-sum-exp.
    assert found["forward only"] == ["_scaled_dot_product_flash_attention_backward"]


def _others(folder: Path) -> dict[str, list[str]]:
    _, theirs = registered(folder)
    found = {}
    for name, call in THEIRS.items():
        call()
        found[name] = list(theirs.calls)
        theirs.calls.clear()
    packed(torch.randn(9, 2, 16).half(), offsets([5, 4]), window_size_left=3)
    assert theirs.calls == [], "the sequences have as many keys as queries"
    q = tokens(9, heads=4).requires_grad_()
    sdpa(q, tokens(9, heads=1), tokens(9, heads=1), 0.0, True)[0].sum().backward()
    found["forward only"] = list(theirs.calls)
    return found


def test_registration_can_be_undone(package: Path) -> None:
    interpreted(_undone, package)


def _undone(folder: Path) -> None:
    theirs, own = PyTorch(), imported(folder, "own_torch")
    q = tokens(9)
    own.unregister()
    own.register(activate=False, device="cpu")
    assert attention.current_flash_attention_impl() is None
    sdpa(q, q, q, 0.0, True)
    assert len(theirs.calls) == 1
    attention.activate_flash_attention_impl("own")
    assert attention.current_flash_attention_impl() == "own"
    sdpa(q, q, q, 0.0, True)
    assert len(theirs.calls) == 1
    own.register(device="cpu")
    own.unregister()
    assert attention.current_flash_attention_impl() is None
    sdpa(q, q, q, 0.0, True)
    assert len(theirs.calls) == 2
    attention.register_flash_attention_impl("other", register_fn=lambda: None)
    attention.activate_flash_attention_impl("other")
    own.unregister()
    assert attention.list_flash_attention_impls().count("own") == 1


def test_importing_changes_nothing(package: Path) -> None:
    interpreted(_imported, package)


def _imported(folder: Path) -> None:
    before = torch._C._get_sdp_priority_order()
    own = imported(folder, "own_torch")
    assert attention.current_flash_attention_impl() is None
    assert "own" not in attention.list_flash_attention_impls()
    assert torch._C._get_sdp_priority_order() == before
    q, k = tokens(9), tokens(12)
    assert own.explain(q, q, q, is_causal=True) == "start"
    assert own.explain(q, k, k) == "whole"
    why = own.explain(q, k, k, is_causal=True)
    assert "start: the kernels compute causal attention, and the first query is at the" in why
    assert "packed: the kernels are for packed sequences" in why
    assert own.explain(q[0], k[0], k[0]).startswith("PyTorch: kernels do not support the shapes")


def test_flash_attention_comes_first_while_it_is_registered(package: Path) -> None:
    interpreted(_ordered, package)


def _ordered(folder: Path) -> None:
    PyTorch()
    own = imported(folder, "own_torch")
    flash, cudnn = 1, 3
    torch._C._set_sdp_priority_order([cudnn, flash, 2, 0])
    before = torch._C._get_sdp_priority_order()
    for changed in (False, True):
        operators = own.operators.Operators("own_torch", (), "CPU")
        operators._prefer(flash)
        now = torch._C._get_sdp_priority_order()
        assert now[:4] == [flash, cudnn, 2, 0]
        if changed:  # by the user, who keeps it
            now = [2, flash, cudnn, 0, *now[4:]]
            torch._C._set_sdp_priority_order(now)
        operators.remove()
        assert torch._C._get_sdp_priority_order() == (now if changed else before)


def test_an_old_torch_is_refused(package: Path) -> None:
    interpreted(_old, package)


def _old(folder: Path) -> None:
    own = imported(folder, "own_torch")
    del attention.restore_flash_attention_impl
    with pytest.raises(
        RuntimeError, match=r"own_torch needs torch 2\.11 or newer, got 2\..*has no"
    ):
        own.register()
    own.unregister()


def test_a_torch_without_cuda_is_refused(package: Path) -> None:
    if torch.backends.cuda.is_built():
        pytest.skip("this torch has CUDA")
    interpreted(_without_cuda, package)


def _without_cuda(folder: Path) -> None:
    own = imported(folder, "own_torch")
    with pytest.raises(RuntimeError, match=r"own_torch: torch 2\..* has no CUDA"):
        own.register()
    assert attention.current_flash_attention_impl() is None
    own.register(device="cpu")
    with pytest.raises(RuntimeError, match="no kernels compute this call of _flash_attention_for"):
        flash(torch.randn(1, 9, 2, 16).half(), 0.1, True, False)


@pytest.mark.thorough
def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    run_example("PyTorch's attention", tmp_path)

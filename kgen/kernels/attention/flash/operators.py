"""The flash operators of PyTorch, computed by the kernels of a package where these fit.

PyTorch's own kernels compute every other call.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention

from .asked import Asked, Flash, FlashBackward, Sdpa, SdpaBackward
from .covering import Kernels, chosen, reasons

ARGUMENTS: dict[str, type[Sdpa | SdpaBackward | Flash | FlashBackward]] = {
    "_scaled_dot_product_flash_attention": Sdpa,
    "_scaled_dot_product_flash_attention_backward": SdpaBackward,
    "_flash_attention_forward": Flash,
    "_flash_attention_backward": FlashBackward,
}
"""The overridden operators of aten, with their arguments."""
NEEDED = (
    "register_flash_attention_impl",
    "activate_flash_attention_impl",
    "current_flash_attention_impl",
    "restore_flash_attention_impl",
)
"""Functions of `torch.nn.attention`. The last one is in torch 2.11 and newer."""


class Registration:
    """The entry of a package in PyTorch's registry of flash attention."""

    def __init__(self, name: str, package: str, table: Sequence[Kernels]) -> None:
        self.name, self.package, self.table = name, package, tuple(table)

    def register(self, *, activate: bool = True, device: str = "cuda") -> None:
        """Register the kernels with PyTorch, and activate them.

        activate: False to register only. torch.nn.attention.activate_flash_attention_impl activates
        them then.
        device: "cpu" for Triton's interpreter. Only varlen_attn calls the kernels there.
        Raises RuntimeError if torch has no such registry or no CUDA.
        """
        absent = [name for name in NEEDED if not hasattr(attention, name)]
        if absent:
            raise RuntimeError(
                f"{self.package} needs torch 2.11 or newer, got {torch.__version__}: "
                f"torch.nn.attention has no {absent[0]}"
            )
        if device == "cuda" and not torch.backends.cuda.is_built():
            raise RuntimeError(f"{self.package}: torch {torch.__version__} has no CUDA")
        key = device.upper()
        attention.register_flash_attention_impl(
            self.name, register_fn=lambda: Operators(self.package, self.table, key)
        )
        if activate:
            attention.activate_flash_attention_impl(self.name)

    def unregister(self) -> None:
        """Use PyTorch's own kernels again. Without a previous `register`, do nothing.

        The name stays in torch.nn.attention.list_flash_attention_impls().
        """
        current = getattr(attention, "current_flash_attention_impl", lambda: None)
        if current() == self.name:
            attention.restore_flash_attention_impl()

    def explain(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> str:
        """Return the name of the kernels that compute flash attention of [B, H, S, D] tensors.

        If PyTorch's own kernels do, return why.
        """
        asked = Sdpa(query, key, value, is_causal=is_causal).asked()
        call = asked.call() if asked else None
        if call is None:
            return "PyTorch: kernels do not support the shapes, devices, strides or scale"
        found = chosen(self.table, call)
        return found.name if found else f"PyTorch:{reasons(self.table, call)}"


class Operators:
    """The overridden operators, until `remove`."""

    def __init__(self, package: str, table: Sequence[Kernels], key: str) -> None:
        self._package, self._table = package, table
        self._theirs = {name: _theirs(name, key) for name in ARGUMENTS}
        self._library: Any = torch.library.Library("aten", "IMPL", key)
        self._orders: tuple[list[int], list[int]] | None = None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*previously registered kernel", UserWarning)
            for name in ARGUMENTS:
                self._library.impl(name, self._of(name), key, with_keyset=True)
        if key == "CUDA":
            # PyTorch calls this when it initializes CUDA, or at once if it has done so.
            torch.cuda._lazy_call(self._put_flash_first)

    def remove(self) -> None:
        """Restore PyTorch's kernels, and its order of backends."""
        self._library = None
        if self._orders and torch._C._get_sdp_priority_order() == self._orders[1]:
            torch._C._set_sdp_priority_order(self._orders[0])
        self._orders = None

    def _put_flash_first(self) -> None:
        """Let scaled_dot_product_attention prefer flash attention.

        On GPUs of compute capability 9.0 and 10.0, PyTorch prefers cuDNN, which is no flash
        operator.
        """
        if self._library is None:
            return
        # PyTorch replaces the order at its first choice of a backend, so let it choose first. The
        # tensor has no elements: this allocates no memory.
        x = torch.empty((1, 1, 0, 8), dtype=torch.float16, device="cuda")
        with attention.sdpa_kernel(attention.SDPBackend.MATH):
            torch._fused_sdp_choice(x, x, x)
        self._prefer(int(attention.SDPBackend.FLASH_ATTENTION))

    def _prefer(self, backend: int) -> None:
        """Move a backend to the front of PyTorch's order."""
        before = torch._C._get_sdp_priority_order()
        order = [backend, *(other for other in before if other != backend)]
        torch._C._set_sdp_priority_order(order)
        self._orders = before, order

    def _of(self, name: str) -> Any:
        """Return the implementation of an operator."""
        arguments, theirs = ARGUMENTS[name], self._theirs[name]
        known = frozenset(arguments.__dataclass_fields__)

        def operator(keys: Any, *args: Any, **options: Any) -> Any:
            # An argument that a later torch adds is for PyTorch's kernels.
            given = arguments(*args, **options) if known.issuperset(options) else None
            asked = given.asked() if given else None
            call = asked.call() if asked else None
            found = chosen(self._table, call) if call else None
            if given is None or asked is None or found is None:
                return theirs(keys, *args, **options)
            if isinstance(given, Sdpa | Flash):
                return self._forward(found, given, asked)
            if not found.backward:
                return theirs(keys, *args, **options)
            return self._backward(found, given, asked)

        return operator

    def _forward(self, kernels: Kernels, given: Sdpa | Flash, asked: Asked) -> Any:
        """Return the results of a forward operator."""
        module = kernels.loaded(self._package)
        q, k, v = asked.turned(asked.q, asked.k, asked.v)
        out, lse = module._out_and_lse_op(q, k, v, *asked.offsets, asked.scale)
        (out,) = asked.turned(out)
        # Kernels have base-2 logarithms.
        lse.mul_(math.log(2))
        if isinstance(given, Sdpa):
            return out, lse, None, None, q.shape[2], k.shape[2], *_unused(q)
        return out, lse, *_unused(q)

    def _backward(
        self, kernels: Kernels, given: SdpaBackward | FlashBackward, asked: Asked
    ) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and v."""
        module = kernels.loaded(self._package)
        do, out, q, k, v = asked.turned(given.grad_out, given.out, asked.q, asked.k, asked.v)
        lse = given.logsumexp * (1 / math.log(2))
        gradients = module._backward_op(do, None, out, lse, q, k, v, *asked.offsets, asked.scale)
        return asked.turned(*gradients)


def _theirs(name: str, key: str) -> Any:
    """Return PyTorch's kernel for an operator."""
    try:
        return torch.library.get_kernel(f"aten::{name}", key).call_boxed
    except RuntimeError:  # PyTorch has none for this device
        return functools.partial(_none, name, key)


def _none(name: str, key: str, *args: Any, **options: Any) -> None:
    raise RuntimeError(f"no kernels compute this call of {name}, and PyTorch has none for {key}")


def _unused(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results that only calls with dropout or a debug mask use."""
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    return seed, torch.empty((), dtype=torch.uint64, device=q.device), q.new_empty(0)

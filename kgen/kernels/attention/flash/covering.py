"""The kernels of a package, and the choice of kernels for a call.

A call is described in FlashAttention's terms. Query i of a sequence has position
i + keys - queries. It sees the keys from `left` positions before it to `right` positions after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

LONGEST = 2**29
"""Most queries and keys that kernels support."""
WIDEST = 2**24
"""Largest stride between the columns of a head."""


@dataclass(frozen=True)
class Call:
    """A call of attention. `layout` is "dense", "packed", "cache" or "pages".

    `left` and `right` are None without a bound. In a packed batch and in a cache, `queries` and
    `keys` are the most of any sequence. `square` is true if each sequence has as many keys as
    queries. `page` is the number of keys in a page.
    `slope_axes` is the number of axes of ALiBi slopes, 0 without ALiBi.
    """

    layout: str
    dtype: torch.dtype
    head: tuple[int, int]
    heads: int
    kv_heads: int
    queries: int
    keys: int
    left: int | None
    right: int | None
    square: bool = False
    softcap: float = 0.0
    slope_axes: int = 0
    page: int | None = None


@dataclass(frozen=True)
class Kernels:
    """The kernels of one spec for one dtype and one head dim: `name` is their function.

    `group` is the number of query heads per key head, or None for any. `left` and `right` bound the
    keys that a query sees. `from_end` is true if the last query has the position of the last key.
    It is false if the first query has the position of the first key. The numbers of queries and
    keys are multiples of `multiples`.
    """

    name: str
    module: str
    layout: str
    dtype: torch.dtype
    head: tuple[int, int]
    group: int | None
    left: int | None
    right: int | None
    from_end: bool
    backward: bool
    softcap: float = 0.0
    slopes: str | None = None
    slope_axes: int = 0
    multiples: tuple[int, int] = (1, 1)
    page: int | None = None

    def loaded(self, package: str) -> ModuleType:
        """Import the module of the kernels, which is in `package`."""
        return import_module(self.module, package)

    def unfit(self, call: Call) -> str:
        """Return why the kernels do not compute a call, or an empty string."""
        if call.layout != self.layout:
            return f"the kernels are for {LAYOUTS[self.layout]}"
        if call.dtype != self.dtype:
            return f"the kernels are for {self.dtype}"
        if call.head != self.head:
            qk, v = self.head
            return f"the kernels are for heads of {qk}" + (f" and {v}" if v != qk else "")
        if call.kv_heads == 0 or call.heads % call.kv_heads:
            return "the query heads are no multiple of the key heads"
        if self.group is not None and call.heads != self.group * call.kv_heads:
            return f"the kernels are for {self.group} query heads per key head"
        if call.softcap != self.softcap:
            return f"the kernels have softcap {self.softcap}"
        if call.slope_axes != self.slope_axes:
            shape = {0: "no ALiBi", 1: "ALiBi slopes [HQ]", 2: "ALiBi slopes [B, HQ]"}
            return f"the kernels have {shape[self.slope_axes]}"
        if call.page != self.page:
            return f"the kernels are for pages of {self.page} keys"
        if call.queries % self.multiples[0] or call.keys % self.multiples[1]:
            q, kv = self.multiples
            return f"the kernels are for multiples of {q} queries and {kv} keys"
        if max(call.queries, call.keys) > LONGEST:
            return "there are more than 2**29 queries or keys"
        own = _seen(call, self.left, self.right, from_end=self.from_end)
        if own != _seen(call, call.left, call.right, from_end=True):
            return f"the kernels compute {self.mask}"
        return ""

    @property
    def mask(self) -> str:
        """The mask in the words of FlashAttention's arguments."""
        left, right = (-1 if bound is None else bound for bound in (self.left, self.right))
        if (left, right) == (-1, -1):
            return "full attention"
        words = "causal attention" if right == 0 else "attention"
        words += f" with window_size ({left}, {right})" if (left, right) != (-1, 0) else ""
        if self.from_end:
            return words
        return f"{words}, and the first query is at the first key"


LAYOUTS = {
    "dense": "sequences of one length",
    "packed": "packed sequences",
    "cache": "a cache with a length per sequence",
    "pages": "a cache in pages",
}


def chosen(table: Iterable[Kernels], call: Call) -> Kernels | None:
    """Return the first kernels that compute a call, or None."""
    return next((kernels for kernels in table if not kernels.unfit(call)), None)


def reasons(table: Iterable[Kernels], call: Call) -> str:
    """Return why no kernels compute a call, with a line for each."""
    return "".join(f"\n  {kernels.name}: {kernels.unfit(call)}" for kernels in table)


def bounds(left: int | None, right: int | None, causal: bool) -> tuple[int | None, int | None]:
    """Return the bounds of FlashAttention's arguments. A negative number means no bound."""
    left = None if left is None or left < 0 else left
    right = None if right is None or right < 0 else right
    return left, 0 if causal else right


def _seen(
    call: Call, left: int | None, right: int | None, *, from_end: bool
) -> tuple[int | None, int | None, Any]:
    """Return a description of the pairs of a mask. Two masks with the same description are equal.

    A bound that excludes no key is None. The last item is the position of the first query, or where
    queries are if sequences have different lengths.
    """
    last_query, keys_after = (call.keys, call.queries) if from_end else (call.queries, call.keys)
    left = None if left is None or left >= last_query - 1 else left
    right = None if right is None or right >= keys_after - 1 else right
    if left is None and right is None and not call.slope_axes:
        return None, None, None
    if call.layout == "dense":
        return left, right, call.keys - call.queries if from_end else 0
    return left, right, from_end or call.square


def regular(*tensors: Tensor) -> bool:
    """True if kernels can address the tensors, and all are on one device."""
    return all(
        x.device == tensors[0].device and x.layout is torch.strided and x.stride(-1) <= WIDEST
        for x in tensors
    )

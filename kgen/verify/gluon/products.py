"""Asynchronous matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kgen.verify.gluon.memory import Memory
from kgen.verify.gluon.running import own, running
from kgen.verify.gluon.schedule import InFlight


class Product:
    """A matrix product in flight. Products of a partition complete in order."""

    def __init__(
        self, a: Any, b: Memory, acc: Tensor | Product | None, before: Product | None
    ) -> None:
        self.a, self.b, self.acc = a, b, acc
        self.value: Tensor | None = None
        follows = None if before is None else before.in_flight
        self.in_flight: InFlight = running.schedule.begin(self._multiply, follows)

    def _multiply(self) -> None:
        a, b = (x.fenced() if isinstance(x, Memory) else x for x in (self.a, self.b))
        assert a.dtype == b.dtype
        product = a.float() @ b.float()
        acc = self.acc.value if isinstance(self.acc, Product) else self.acc
        self.value = product if acc is None else acc + product


def mma(a: Any, b: Memory, acc: Tensor, *, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async
    products = own.begun.products
    product = Product(a, b, acc if use_acc else None, products[-1] if products else None)
    products.append(product)
    running.schedule.others()
    return product


def mma_wait(pending: int, deps: Sequence[Any]) -> Any:
    running.schedule.others()
    products = own.begun.products
    while len(products) > pending:
        running.schedule.finish(products.pop(0).in_flight)
    waited = [d for d in deps if isinstance(d, Product)]
    assert not any(d in products for d in waited), "the product is still in flight"
    found = [d.value if isinstance(d, Product) else d for d in deps]
    return found[0] if len(found) == 1 else tuple(found)

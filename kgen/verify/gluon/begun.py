"""Asynchronous transfers and products of a partition."""

from __future__ import annotations

from torch import Tensor

from kgen.verify.gluon.memory import Barriers, Loading
from kgen.verify.gluon.products import Product
from kgen.verify.gluon.schedule import InFlight


class Begun:
    """The transfers and products of one partition that are in flight, oldest first."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.stores: list[InFlight] = []
        self.loads: list[Loading] = []
        self.unfenced: list[Tensor] = []
        self.barriers: list[Barriers] = []

"""Transfers and products that a partition has begun."""

from __future__ import annotations

from torch import Tensor

from kgen.verify.gluon.memory import Barriers, Loading
from kgen.verify.gluon.products import Product
from kgen.verify.gluon.schedule import InFlight


class Begun:
    """What one partition has under way, oldest first."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.stores: list[InFlight] = []
        self.loads: list[Loading] = []
        self.unfenced: list[Tensor] = []
        self.barriers: list[Barriers] = []

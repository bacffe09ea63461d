"""Chunk output in the CuTe DSL: a file for each architecture."""

from kgen.family import Lazy, Target
from kgen.targets.cute import RUNTIME

TARGET = Target(
    runtime=RUNTIME,
    sources=Lazy(f"{__name__}.sources:sources"),
    emits="A file for each architecture.",
    options=Lazy(f"{__name__}.options:CuteOptions"),
    forward_only=True,
)

"""The Python code that compiles, loads and launches the kernels of a .cu file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kgen.targets.template import Template


@dataclass(frozen=True)
class Loader(Template):
    """The functions `_arch`, `_source`, `_kernel` and `_launch` of an emitted module."""

    template: ClassVar[str] = "cuda/_loader.j2"

    name: str
    major: int
    minor: int
    """The least compute capability is `major.minor`."""
    dynamic_shared: bool = False
    """True if launches have dynamic shared memory and clusters."""

    @property
    def shared(self) -> str:
        """The expression for the bytes of dynamic shared memory."""
        return "shared" if self.dynamic_shared else "0"

    @property
    def arguments(self) -> str:
        """The parts of a launch configuration."""
        return "grid, block, shared, cluster" if self.dynamic_shared else "grid, block"

    @property
    def config(self) -> str:
        """The arguments of `LaunchConfig`."""
        if not self.dynamic_shared:
            return "grid=grid, block=block"
        return "grid=grid, cluster=cluster if cluster > 1 else None, block=block, shmem_size=shared"

"""The parameters of a spec's function."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Signature:
    """The parameters of a spec's function. `str` prints them in Python."""

    tensors: tuple[str, ...]
    """The positional parameters."""
    required: tuple[str, ...]
    """The keywords without a default."""
    defaults: tuple[tuple[str, str], ...]
    """The other keywords, each with its default in Python."""

    def __str__(self) -> str:
        defaults = (f"{name}={default}" for name, default in self.defaults)
        return ", ".join([*self.tensors, "*", *self.required, *defaults])

    @property
    def usage(self) -> str:
        """The arguments of a call that uses all defaults."""
        return ", ".join([*self.tensors, *(f"{name}={name}" for name in self.required)])

    @property
    def arguments(self) -> list[str]:
        """The arguments of a call that passes on all parameters."""
        keywords = (*self.required, *(name for name, _ in self.defaults))
        return [*self.tensors, *(f"{name}={name}" for name in keywords)]


NO_PARAMETERS = Signature((), (), ())

"""Numbers and tensors of a call, which depend on sizes and tiles. Launchers in Python and in C
print them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.targets.triton.text import TORCH_DTYPES


def table_name(kernel: str) -> str:
    """Return the name of a kernel's tile table."""
    return f"_{kernel.upper()}_TILES"


@dataclass(frozen=True)
class Blocks:
    """The number of blocks in which the tile of a kernel divides columns."""

    columns: int
    field: str
    """The field of the tile: `BLOCK_K` or `BLOCK_V`."""
    kernel: str

    def in_python(self, launched: str) -> str:
        """Print in a launcher in Python, where `tile` is the tile of the launched kernel."""
        own = self.kernel == launched
        tile = "tile" if own else f"_tile({table_name(self.kernel)}, arch)"
        return f'{self.columns} // {tile}["{self.field}"]'

    def in_c(self) -> str:
        """Print in a launcher in C, where the problem `p` has the tile of each kernel."""
        return f"{self.columns} / p->{self.kernel}.{self.field}"


@dataclass(frozen=True)
class RowBlocks:
    """The number of blocks in which the tile of a kernel divides the tokens of a sequence."""

    kernel: str

    def in_python(self, launched: str) -> str:
        """Print in a launcher in Python."""
        assert self.kernel == launched
        return '_cdiv(T, tile["ROWS"])'

    def in_c(self) -> str:
        """Print in a launcher in C."""
        return f"kgen_cdiv(p->T, p->{self.kernel}.ROWS)"


Factor = str | int | Blocks | RowBlocks
"""A size by its name, a number, or a number of blocks."""


@dataclass(frozen=True)
class Count:
    """A product of factors, plus a number."""

    factors: tuple[Factor, ...]
    plus: int = 0

    def in_python(self, launched: str) -> str:
        """Print in a launcher in Python."""
        several = len(self.factors) > 1
        texts = []
        for one in self.factors:
            text = one.in_python(launched) if isinstance(one, Blocks | RowBlocks) else str(one)
            texts.append(f"({text})" if several and isinstance(one, Blocks) else text)
        product = " * ".join(texts)
        return f"{self.plus} + {product}" if self.plus else product

    def in_c(self) -> str:
        """Print in a launcher in C, in parentheses if it is a sum or a quotient."""
        texts = []
        for one in self.factors:
            if isinstance(one, Blocks | RowBlocks):
                text = one.in_c()
                texts.append(f"({text})" if isinstance(one, Blocks) else text)
            else:
                texts.append(f"p->{one}" if isinstance(one, str) else str(one))
        product = " * ".join(texts)
        return f"({self.plus} + {product})" if self.plus else product


def count(*factors: Factor, plus: int = 0) -> Count:
    """Return a product of factors, plus a number."""
    return Count(factors, plus)


@dataclass(frozen=True)
class Made:
    """A tensor that the launcher allocates."""

    name: str
    like: str
    """The tensor whose device it has, and whose dtype and shape if it has none of its own."""
    shape: tuple[Count, ...] = ()
    """The shape; if empty, that of `like`."""
    behind: str | None = None
    """A tensor whose shape follows."""
    dtype: str | None = None
    """The dtype in specs; None for that of `like`."""
    zeros: bool = False
    flag: str | None = None
    """The flag without which the tensor is empty."""

    def call(self, launched: str) -> str:
        """Print the call in Python that allocates it for the launch of a kernel."""
        shape = f"{self.like}.shape"
        if self.shape:
            sizes = [one.in_python(launched) for one in self.shape]
            sizes += [] if self.behind is None else [f"*{self.behind}.shape"]
            shape = f"({', '.join(sizes)})"
        if self.flag:
            shape += f" if {self.flag} else 0"
        of = f", dtype=torch.{TORCH_DTYPES[self.dtype]}" if self.dtype else ""
        return f"{self.like}.new_{'zeros' if self.zeros else 'empty'}({shape}{of})"

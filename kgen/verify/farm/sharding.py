"""`--shard i/n`: a part of the tasks, for a matrix of independent machines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from kgen.diagnostics import Diagnostic, KgenError

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """Part `number` of `count`, starting at 1."""

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str | None) -> Shard:
        """Parse `2/4`; None is the whole. Raises `KgenError` for other text."""
        if text is None:
            return cls()
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
        number, count = map(int, found.groups()) if found else (0, 0)
        if not 1 <= number <= count:
            hint = (
                f"parts are 1/{count} to {count}/{count}"
                if count
                else "for example `--shard 1/4`, the first of four"
            )
            raise KgenError(Diagnostic("bad-shard", f"`--shard {text}` is not a part", hint=hint))
        return cls(number, count)

    def of(self, things: Iterable[T], key: Callable[[T], object]) -> list[T]:
        """Return the things of this part in their order.

        Sorted keys are dealt out in turn, so the order of the input does not matter.
        """
        things = list(things)
        keys = sorted({str(key(one)) for one in things})
        own = set(keys[self.number - 1 :: self.count])
        return [one for one in things if str(key(one)) in own]


WHOLE = Shard()

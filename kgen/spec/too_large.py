"""Report expressions that are within the limits, but too large once a pass has expanded them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kgen.diagnostics import KgenError
from kgen.expr.nodes import walk

if TYPE_CHECKING:
    from kgen.spec.load import Loaded


@contextmanager
def too_large(loaded: Loaded) -> Iterator[None]:
    """Turn a `RecursionError` of the body into a `KgenError` at the largest expression.

    Only expressions nest, so only they can exhaust Python's stack.
    """
    try:
        yield
    except RecursionError:
        from kgen.spec.source import Document

        field = max(loaded.trees, key=lambda name: sum(1 for _ in walk(loaded.trees[name])))
        message = f"`{field}` is too large once it is simplified and differentiated"
        hint = "use fewer terms, or move numbers into a buffer"
        document = Document(loaded.text, loaded.path.as_posix())
        raise KgenError(document.value("too-large", message, (field,), hint)) from None

"""The field `adapters` of a spec: a list of the adapters that its family has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from kgen.family import Lazy, family
from kgen.spec.problems import all_known, problem


def adapters_field(kernel: str) -> Any:
    """Return the type of the field for a family. A dump of a spec excludes it, as it does not
    change kernels.
    """
    known = family(kernel).adapters
    items = tuple[Literal[tuple(known)], ...]  # type: ignore[misc, valid-type]
    check = BeforeValidator(lambda value: _checked(value, known))
    unique: dict[str, Any] = {"uniqueItems": True}
    return Annotated[items, Field(strict=False, exclude=True, json_schema_extra=unique), check]


def _checked(value: Any, known: Mapping[str, Lazy]) -> Any:
    if not isinstance(value, list | tuple):
        return value
    all_known(value, known, "no-adapter", "adapter")
    for i, name in enumerate(value):
        if name in value[:i]:
            raise problem(
                "duplicate-value", f"`adapters` lists `{name}` twice", "list each once", at=(i,)
            )
    return value

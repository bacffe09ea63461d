"""Turn validation errors into diagnostics in the terms of the spec language."""

from __future__ import annotations

import re
import typing
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import ErrorDetails, PydanticCustomError

from kgen.diagnostics import Diagnostic, did_you_mean, shown
from kgen.family import families
from kgen.spec.source import Document, Path


class SpecModel(BaseModel):
    """A part of a spec: immutable, no unknown keys, no conversions. `schema.py` reads the
    docstrings of fields.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def problem(
    code: str, message: str, hint: str | None = None, *, at: Path = (), key: bool = False
) -> PydanticCustomError:
    """Return an error for a validator to raise.

    `at` is the path from the validated value to the wrong one. With `key`, the diagnostic marks the
    key instead.
    """
    return PydanticCustomError(
        "kgen", "{message}", {"code": code, "message": message, "hint": hint, "at": at, "key": key}
    )


def all_known(names: Sequence[Any], known: Collection[str], code: str, kind: str) -> None:
    """Raise `code` at the first name that is not in `known`. `kind` is a word for the message, such
    as `pass`.
    """
    for i, name in enumerate(names):
        if name not in known:
            hint = did_you_mean(name, known) if isinstance(name, str) else None
            raise problem(
                code,
                f"there is no {kind} {shown(name)}",
                hint or f"choose from {', '.join(known)}",
                at=(i,),
            )


def described(document: Document, model: type[BaseModel], error: ErrorDetails) -> Diagnostic:
    """Return a validation error of `model` as a diagnostic with its position in the file."""
    path: Path = error["loc"]
    context = error.get("ctx", {})
    if error["type"] == "kgen":
        on_key = context["key"] or path[-1:] == ("[key]",)
        path = (*(step for step in path if step != "[key]"), *context["at"])
        place = document.key if on_key else document.value
        return place(context["code"], context["message"], path, context["hint"])
    if error["type"] == "extra_forbidden":
        known = sorted(_known_keys(model, path[:-1]))
        hint = _elsewhere(path) or did_you_mean(str(path[-1]), known)
        hint = hint or f"the keys here are {', '.join(known)}"
        return document.key(
            "unknown-key", f"{shown(path[-1])} is not a key of {_where(path[:-1])}", path, hint
        )
    if error["type"] == "missing":
        message = f"{_where(path[:-1])} needs a `{path[-1]}`"
        return document.value("missing-key", message, path[:-1], _example(model, path))
    label = f"`{'.'.join(map(str, document.existing(path)))}`"
    code, message, advice = _translated(error["type"], context, error["input"], error["msg"])
    return document.value(code, f"{label} {message}", path, advice)


def _translated(
    type_: str, context: dict[str, Any], value: Any, fallback: str
) -> tuple[str, str, str]:
    """Return code, message and hint for an error of pydantic's own checks."""
    if type_ == "literal_error":
        choices = [c.strip("'") for c in re.findall(r"'[^']*'|-?\d+", context["expected"])]
        listed = (
            f"must be one of {', '.join(choices)}"
            if len(choices) > 1
            else f"must be `{choices[0]}`"
        )
        hint = did_you_mean(value, choices) if isinstance(value, str) else None
        return "bad-value", f"{listed}, not {shown(value)}", hint or "write one of them"
    if type_ in _NEEDED:
        needed, hint = _NEEDED[type_]
        return "wrong-type", f"must be {needed}, not {shown(value)}", hint
    if type_ in ("greater_than_equal", "less_than_equal"):
        bound = f"at least {context['ge']}" if "ge" in context else f"at most {context['le']}"
        return "out-of-range", f"must be {bound}, not {shown(value)}", f"write a number of {bound}"
    if type_ == "too_short":
        return "bad-value", "cannot be empty", "write at least one item"
    if type_ == "too_long":
        return (
            "bad-value",
            f"must have at most {context['max_length']} items, not {context['actual_length']}",
            "shorten it",
        )
    return "bad-value", f"is wrong: {fallback}", "`kgen schema` prints the schema of a spec"


_NEEDED: dict[str, tuple[str, str]] = {
    "int_type": ("an integer", "write it in digits, without quotes or a point"),
    "string_type": ("text", "put quotes around it"),
    "bool_type": ("true or false", "write `true` or `false`, without quotes"),
    "dict_type": ("a mapping", "write `key: value` lines under it"),
    "model_type": ("a mapping", "write `key: value` lines under it"),
    "model_attributes_type": ("a mapping", "write `key: value` lines under it"),
    "float_type": ("a number", "write it in digits, without quotes"),
    "float_parsing": ("a number", "write it in digits, without quotes"),
    "finite_number": ("a finite number", "write it in digits"),
    "tuple_type": ("a list", "write `[a, b]`"),
}


def _where(path: Path) -> str:
    return f"`{'.'.join(map(str, path))}`" if path else "the spec"


def _example(model: type[BaseModel], path: Path) -> str:
    """Return a hint that adds a missing key, from the examples of its field."""
    for parent in _models(model, path[:-1]):
        examples = parent.model_fields[str(path[-1])].examples
        if examples:
            example = examples[0]
            example = f"[{', '.join(map(str, example))}]" if isinstance(example, list) else example
            return f"add `{path[-1]}: {example}`"
    return f"add `{path[-1]}: ...`"


def _elsewhere(path: Path) -> str | None:
    """Return a hint that names the families which have a key that this family lacks, if any."""
    key = str(path[-1])
    having = [
        one.name for one in families() if len(path) == 1 and key in one.model.get().model_fields
    ]
    return (
        f"it is a key of {' and '.join(f'`kernel: {name}`' for name in having)}" if having else None
    )


def _known_keys(model: type[BaseModel], path: Path) -> set[str]:
    return {name for parent in _models(model, path) for name in parent.model_fields}


def _models(model: type[BaseModel], path: Path) -> list[type[BaseModel]]:
    """Return the models that a mapping under `path` may have."""
    found = [model]
    for step in path:
        fields = [parent.model_fields[step] for parent in found if step in parent.model_fields]
        if fields:
            found = [inner for field in fields for inner in _inner(field.annotation)]
    return found


def _inner(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _inner(argument)

"""The JSON schema of specs, for editors: completion and checks while typing."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from kgen.family import families
from kgen.spec.problems import SpecModel

PATH = Path(__file__).with_name("schema.json")


def json_schema() -> dict[str, Any]:
    """The schema of a spec of any kernel family, in JSON Schema 2020-12; equal on every run."""
    models = [family.model.get() for family in families()]
    schema = TypeAdapter(_union(models)).json_schema()
    _describe(schema["$defs"], SpecModel)
    for family in families():
        for name in family.varies:
            _list(schema["$defs"][family.model.get().__name__]["properties"], name)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "kgen spec"}


def text() -> str:
    """What `schema.json` holds."""
    return json.dumps(json_schema(), indent=2) + "\n"


def _union(models: list[Any]) -> Any:
    union = models[0]
    for model in models[1:]:
        union = union | model
    return union


def _list(properties: dict[str, Any], name: str) -> None:
    """Let a field have several values, as `Family.varies` says."""
    own = properties[name]
    said = {key: own.pop(key) for key in ("title", "description", "examples", "default") if key in own}
    several = {"type": "array", "items": own, "minItems": 1}
    properties[name] = {**said, "anyOf": [*own.get("anyOf", [own]), several]}


def _describe(made: dict[str, Any], model: type[SpecModel]) -> None:
    """Let docstrings describe fields, also those that a model has from another. pydantic would read them for
    every spec that is rendered, which takes longer than to check it."""
    for child in model.__subclasses__():
        _describe(made, child)
        # A name that several modules have is told apart by theirs.
        there = {child.__name__, f"{child.__module__.replace('.', '__')}__{child.__name__}"} & {*made}
        described = {name: text for base in child.__mro__[::-1] for name, text in _docstrings(base)}
        for properties in (made[name]["properties"] for name in there):
            for name, text in described.items():
                properties[name] = dict(sorted({"description": text, **properties[name]}.items()))


def _docstrings(model: type) -> Iterator[tuple[str, str]]:
    """Fields of a model with the docstring that follows each."""
    if not issubclass(model, SpecModel):
        return
    try:
        source = inspect.getsource(model)
    except OSError:  # made by `create_model`, which was told
        return
    (made,) = ast.parse(source).body
    assert isinstance(made, ast.ClassDef)
    for field, text in zip(made.body, made.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                yield name, inspect.cleandoc(words)

"""The JSON schema of specs, with which editors complete and check them."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from kgen.family import families
from kgen.spec.problems import SpecModel

PATH = Path(__file__).with_name("schema.json")
TITLE = "kgen spec"


def json_schema() -> dict[str, Any]:
    """Return the schema of specs of all families, in JSON Schema 2020-12; the result is the same on
    every run.

    `kernel` selects the family by `if` and `then`. With a union, editors would offer the keys of
    all families and report the errors of each.
    """
    models = {family.name: family.model.get() for family in families()}
    schema = TypeAdapter(_union([*models.values()])).json_schema()
    _describe(schema["$defs"], SpecModel)
    _join_lines(schema["$defs"])
    for family in families():
        for name in family.varies:
            _list(schema["$defs"][family.model.get().__name__]["properties"], name)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": TITLE,
        "type": "object",
        "required": ["kernel"],
        "properties": {"kernel": {"description": "The family of kernels.", "enum": [*models]}},
        "allOf": [
            {
                "if": {"properties": {"kernel": {"const": name}}, "required": ["kernel"]},
                "then": {"$ref": f"#/$defs/{model.__name__}"},
            }
            for name, model in models.items()
        ],
        "$defs": schema["$defs"],
    }


def text() -> str:
    """Return the content of `schema.json`."""
    return json.dumps(json_schema(), indent=2) + "\n"


def shipped() -> str:
    """Return the schema from `schema.json`, which is faster than building it."""
    return PATH.read_text(encoding="utf-8")


def is_ours(text: str) -> bool:
    """True if a text is the schema of specs, of any version."""
    return f'\n  "title": "{TITLE}"' in text


def _union(models: list[Any]) -> Any:
    union = models[0]
    for model in models[1:]:
        union = union | model
    return union


def _list(properties: dict[str, Any], name: str) -> None:
    """Allow a list of values for a field of `Family.varies`."""
    own = properties[name]
    said = {
        key: own.pop(key) for key in ("title", "description", "examples", "default") if key in own
    }
    several = {"type": "array", "items": own, "minItems": 1}
    properties[name] = {**said, "anyOf": [*own.get("anyOf", [own]), several]}


def _describe(made: dict[str, Any], model: type[SpecModel]) -> None:
    """Add the docstrings of fields as descriptions, including those of base classes.

    `use_attribute_docstrings` of pydantic would read them in every run, which takes longer than to
    check a spec.
    """
    for child in model.__subclasses__():
        _describe(made, child)
        # pydantic prefixes a class name that several modules have with the module.
        there = {child.__name__, f"{child.__module__.replace('.', '__')}__{child.__name__}"} & {
            *made
        }
        described = {name: text for base in child.__mro__[::-1] for name, text in _docstrings(base)}
        for properties in (made[name]["properties"] for name in there):
            for name, text in described.items():
                properties[name] = dict(sorted({"description": text, **properties[name]}.items()))


def _join_lines(made: dict[str, Any]) -> None:
    """Make each paragraph of a description one line. Indented lines stay as they are."""
    for model in made.values():
        for one in (model, *model.get("properties", {}).values()):
            if "description" in one:
                one["description"] = re.sub(r"(?<=\S)\n(?=\S)", " ", one["description"])


def _docstrings(model: type) -> Iterator[tuple[str, str]]:
    """Yield the fields of a model with their docstrings."""
    if not issubclass(model, SpecModel):
        return
    try:
        source = inspect.getsource(model)
    except OSError:  # `create_model` made it, with descriptions
        return
    (made,) = ast.parse(source).body
    assert isinstance(made, ast.ClassDef)
    for field, text in zip(made.body, made.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(words))
            ):
                yield name, inspect.cleandoc(words)

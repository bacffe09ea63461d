"""The JSON schema of specs, for editors: completion and checks while typing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from kgen.family import families

PATH = Path(__file__).with_name("schema.json")


def json_schema() -> dict[str, Any]:
    """The schema of a spec of any kernel family, in JSON Schema 2020-12; equal on every run."""
    schema = TypeAdapter(_union([family.model.get() for family in families()])).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "kgen spec"}


def text() -> str:
    """What `schema.json` holds."""
    return json.dumps(json_schema(), indent=2) + "\n"


def _union(models: list[Any]) -> Any:
    union = models[0]
    for model in models[1:]:
        union = union | model
    return union

"""A spec file to a checked model and typed expressions, or to every diagnostic that it deserves."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kgen import files
from kgen.diagnostics import Diagnostic, KgenError, did_you_mean, shown
from kgen.expr.nodes import Node
from kgen.expr.parse import parse_with_locals
from kgen.expr.text_checks import ExpressionError
from kgen.family import NAMES, family
from kgen.files import checked_path
from kgen.spec.problems import described
from kgen.spec.source import MAX_BYTES, Document, decode


@dataclass(frozen=True)
class Loaded:
    """A spec that is right: its text with "\\n" line ends, its model, and its expressions as typed trees."""

    path: Path
    text: str
    spec: Any
    """The model of its family."""
    trees: Mapping[str, Node]
    """By field of the spec, for the fields that are there: `score_mod`, `mask_mod`, ..."""
    called: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What callers say for a name that gave way to one of the kernels."""
    locals: Mapping[str, Node] = dataclasses.field(default_factory=dict)
    """The values that expressions have local names for, by name; of a name of two fields that of the first."""
    listed: tuple[str, ...] = ()
    """Fields for which the file has a list; this spec has one value of each."""

    @property
    def variant(self) -> str:
        """Which values it has of those listed, as `bf16_d64`; empty where the file lists none."""
        varies = family(self.spec.kernel).varies
        return "_".join(varies[field].word(self.spec) for field in self.listed)

    @property
    def folder(self) -> str:
        """Where its files are, below that of all kernels."""
        return f"{self.spec.name}/{self.variant}" if self.variant else str(self.spec.name)


def load(path: str | Path) -> Loaded:
    """Read and check one YAML file of one variant. Raises `KgenError` with all its diagnostics."""
    return _only(load_variants(path))


def loads(text: str, path: str | Path) -> Loaded:
    """Check the text of a spec of one variant; `path` is the name that diagnostics show. Raises `KgenError`."""
    return _only(loads_variants(text, path))


def load_variants(path: str | Path) -> list[Loaded]:
    """Read and check one YAML file: a spec for each combination of the values that it lists, as `dtype: [bf16, fp16]`.
    Raises `KgenError` with all its diagnostics."""
    file = checked_path(Path(path))
    try:
        content = files.read(file, MAX_BYTES)
    except OSError as error:
        message = f"cannot read the file: {error.strerror or error}"
        place = Diagnostic("cannot-read", message, file.as_posix(), 1, 1, hint="check its path")
        raise KgenError(place) from None
    return loads_variants(decode(content, file.as_posix()), file)


def loads_variants(text: str, path: str | Path) -> list[Loaded]:
    """The same of a text; `path` is the name that diagnostics show."""
    document = Document(text, Path(path).as_posix())
    own = family(_kernel(document))
    listed = [field for field in own.varies if isinstance(document.data.get(field), list)]
    empty = [field for field in listed if not document.data[field]]
    wrong = [document.value("bad-value", f"`{f}` lists nothing", (f,), "list a value or more") for f in empty]
    found: list[Loaded] = []
    made: dict[tuple[str, str], int] = {}
    for places in itertools.product(*(range(len(document.data[field])) for field in listed)):
        try:
            one = _checked(document.choosing(dict(zip(listed, places, strict=True))), Path(path))
        except KgenError as error:
            wrong += error.diagnostics
            continue
        found.append(dataclasses.replace(one, listed=tuple(listed)))
        for field, place in zip(listed, places, strict=True):
            word = own.varies[field].word(one.spec)
            if made.setdefault((field, word), place) != place:
                message = f"`{field}` lists `{word}` twice"
                wrong.append(
                    document.value("duplicate-value", message, (field, place), "list each value once")
                )
    if wrong:
        raise _failure(wrong)
    return found


def _only(variants: list[Loaded]) -> Loaded:
    if len(variants) > 1:
        message = f"the spec has variants: {', '.join(one.variant for one in variants)}"
        raise KgenError(
            Diagnostic("variants", message, str(variants[0].path), hint="load_variants has them all")
        )
    return variants[0]


def _checked(document: Document, path: Path) -> Loaded:
    model = family(_kernel(document)).model.get()
    try:
        spec = model.model_validate(document.data)
    except ValidationError as error:
        raise _failure(described(document, model, details) for details in error.errors()) from None

    trees: dict[str, Node] = {}
    locals_: dict[str, Node] = {}
    wrong: list[Diagnostic] = []
    for field, (source, scope, result) in spec.expressions().items():
        try:
            trees[field], named = parse_with_locals(source, scope, result)
            locals_ |= {name: node for name, node in named.items() if name not in locals_}
        except ExpressionError as e:
            place = (e.line, e.column, e.length)
            wrong.append(document.inside(e.code, e.message, (field,), *place, hint=e.hint))
    if not wrong:
        details = (
            ErrorDetails(type=e.type, loc=(), msg="", input=None, ctx=e.context or {})
            for e in spec.check(trees)
        )
        wrong = [described(document, model, d) for d in details]
    if wrong:
        raise _failure(wrong)
    return Loaded(path, document.text, spec, trees, locals=locals_)


def _kernel(document: Document) -> str:
    kernel = document.data.get("kernel")
    if "kernel" not in document.data:
        hint = "add `kernel: attention`"
        raise KgenError(document.value("missing-key", "the spec needs a `kernel`", (), hint))
    if isinstance(kernel, str) and kernel in NAMES:
        return kernel
    path = ("kernel",)
    supported = " or ".join(f"`kernel: {name}`" for name in NAMES)
    near = did_you_mean(kernel, NAMES) if isinstance(kernel, str) else None
    hint = near or f"write {supported}"
    raise KgenError(document.value("unknown-kernel", f"there is no kernel {shown(kernel)}", path, hint))


def _failure(diagnostics: Iterable[Diagnostic]) -> KgenError:
    # A short form that stands for two fields is reported once.
    unique = dict.fromkeys(diagnostics)
    return KgenError(sorted(unique, key=lambda d: (d.line or 0, d.column or 0)))

"""Load a spec file: a validated model and typed expressions, or all diagnostics of the file."""

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
    """A valid spec: its text with "\\n" line ends, its model, and its expressions as typed
    trees.
    """

    path: Path
    text: str
    spec: Any
    """The pydantic model of the family."""
    trees: Mapping[str, Node]
    """Typed trees by the field of the spec: `score_mod`, `mask_mod`, ..."""
    called: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Names that callers use, by the names that replace them inside kernels."""
    locals: Mapping[str, Node] = dataclasses.field(default_factory=dict)
    """Values of local names in expressions. If two fields define a name, the first counts."""
    listed: tuple[str, ...] = ()
    """Fields for which the file has a list; this spec has one value of each."""

    @property
    def variant(self) -> str:
        """The selected values of listed fields, such as `bf16_d64`; empty if the file has no
        list.
        """
        varies = family(self.spec.kernel).varies
        return "_".join(varies[field].word(self.spec) for field in self.listed)

    @property
    def folder(self) -> str:
        """The folder of its files, relative to the output directory."""
        return f"{self.spec.name}/{self.variant}" if self.variant else str(self.spec.name)


def load(path: str | Path) -> Loaded:
    """Read and check a YAML file with one variant. Raises `KgenError` with all diagnostics."""
    return _only(load_variants(path))


def loads(text: str, path: str | Path) -> Loaded:
    """Check the text of a spec with one variant. Raises `KgenError`, whose diagnostics show
    `path`.
    """
    return _only(loads_variants(text, path))


def load_variants(path: str | Path) -> list[Loaded]:
    """Read and check a YAML file. Return a spec for each combination of listed values, as
    `dtype: [bf16, fp16]`.

    Raises `KgenError` with all diagnostics.
    """
    file = checked_path(Path(path))
    try:
        content = files.read(file, MAX_BYTES)
    except OSError as error:
        message = f"cannot read the file: {error.strerror or error}"
        place = Diagnostic("cannot-read", message, file.as_posix(), 1, 1, hint="check its path")
        raise KgenError(place) from None
    return loads_variants(decode(content, file.as_posix()), file)


def loads_variants(text: str, path: str | Path) -> list[Loaded]:
    """Check a text as `load_variants` checks a file. Diagnostics show `path`."""
    document = Document(text, Path(path).as_posix())
    own = family(_kernel(document))
    listed = [field for field in own.varies if isinstance(document.data.get(field), list)]
    empty = [field for field in listed if not document.data[field]]
    wrong = [
        document.value("bad-value", f"`{f}` is an empty list", (f,), "list at least one value")
        for f in empty
    ]
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
                    document.value(
                        "duplicate-value", message, (field, place), "list each value once"
                    )
                )
    if wrong:
        raise _failure(wrong)
    return found


def _only(variants: list[Loaded]) -> Loaded:
    if len(variants) > 1:
        message = f"the spec has several variants: {', '.join(one.variant for one in variants)}"
        raise KgenError(
            Diagnostic(
                "variants", message, str(variants[0].path), hint="call `load_variants` instead"
            )
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
    raise KgenError(
        document.value("unknown-kernel", f"there is no kernel {shown(kernel)}", path, hint)
    )


def _failure(diagnostics: Iterable[Diagnostic]) -> KgenError:
    # `head_dim: 0` is an error of both `qk` and `v`, at the same place: report it once.
    unique = dict.fromkeys(diagnostics)
    return KgenError(sorted(unique, key=lambda d: (d.line or 0, d.column or 0)))

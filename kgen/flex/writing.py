"""The YAML of an imported spec, with comments about assumptions."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

from kgen.diagnostics import KgenError, escaped
from kgen.expr.nodes import Node, Read, transform
from kgen.family import family
from kgen.flex.source import Place
from kgen.flex.text import written
from kgen.render.rendering import render_spec
from kgen.spec.load import Loaded, loads
from kgen.spec.user_text import UserText

Shape = tuple[int | str, ...]
MAX_RENAMES = 20


@dataclass(eq=False)
class Spec:
    """An imported spec. `buffers` maps a name to shape, dtype, gradient flag and origin."""

    name: str
    origin: str
    dtype: str
    head_dim: int
    gqa: int | str
    trees: Mapping[str, Node]
    buffers: dict[str, tuple[Shape, str, bool, str]] = field(default_factory=dict)
    labels: dict[Node, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    places: dict[str, Place] = field(default_factory=dict)
    """The place of each mod."""
    ascending: set[str] = field(default_factory=set)
    """Buffers whose rows the source sorts."""
    sorted: set[str] = field(default_factory=set)
    """Buffers with `sorted: true`."""

    def promised(self, useful: Iterable[str]) -> Spec:
        """Return the spec with `sorted: true` for proved `useful` buffers, and a note for the
        others.
        """
        left = [name for name in useful if name not in self.ascending]
        notes = [
            f"if each row of {name} ascends, `sorted: true` lets kernels skip tiles"
            for name in left
        ]
        return replace(self, sorted={*useful} & self.ascending, notes=[*self.notes, *notes])

    def renamed(self, old: str, new: str) -> Spec:
        """Return the spec with another name for one buffer."""

        def rename(node: Node) -> Node:
            return (
                Read(new, node.indices, node.type)
                if isinstance(node, Read) and node.buffer == old
                else node
            )

        buffers = {new if name == old else name: value for name, value in self.buffers.items()}
        notes = [*self.notes, f"{new} is {old} of the source: kernels reserve the name {old}"]
        trees = {f: transform(tree, rename) for f, tree in self.trees.items()}
        labels = {transform(node, rename): label for node, label in self.labels.items()}
        ascending = {new if name == old else name for name in self.ascending}
        return replace(
            self, trees=trees, buffers=buffers, labels=labels, notes=notes, ascending=ascending
        )

    def text(self) -> str:
        """Return the YAML."""
        spec = YAML().load("kernel: attention\n")
        spec["name"] = self.name
        spec["summary"] = DoubleQuotedScalarString(_summary(self.origin))
        spec["dtype"] = self.dtype
        spec["head_dim"] = self.head_dim
        spec["gqa"] = self.gqa
        if self.buffers:
            spec["buffers"] = CommentedMap()
            for name, value in self.buffers.items():
                _buffer(spec["buffers"], name, *value, name in self.sorted)
        for field_, tree in self.trees.items():
            text = written(tree, self.labels, self.buffers)
            spec[field_] = LiteralScalarString(text + "\n") if "\n" in text else _scalar(text)
        spec["passes"] = _flow(["forward", "backward"])
        spec["targets"] = YAML().load("{triton: {}}")
        said = [_comment(f"Imported from {self.origin}"), *map(_comment, self.notes)]
        assumed = (
            "The source does not define dtype, head_dim and gqa. "
            "Change them here, or by options of `kgen import`"
        )
        spec.yaml_set_start_comment("\n".join([*said, assumed]))
        out = io.StringIO()
        yaml = YAML()
        yaml.width = 2**20
        yaml.dump(spec, out)
        return out.getvalue()


def settled(spec: Spec, file: str) -> tuple[str, Loaded]:
    """Return the text of a spec that can be rendered, and the loaded spec.

    Rename buffers whose names kernels reserve. Raise `KgenError` if kernels cannot compute the
    spec.
    """
    for _ in range(MAX_RENAMES):
        text = spec.text()
        try:
            loaded = loads(text, file)
            render_spec(loaded)
            return _with_promises(spec, text, loaded, file)
        except KgenError as error:
            taken = _taken(error, spec)
            if not taken:
                _at_the_source(error, spec, text)
                raise
            for name in taken:
                spec = spec.renamed(name, _other(name, spec))
    raise AssertionError("names do not settle")


def _with_promises(spec: Spec, text: str, loaded: Loaded, file: str) -> tuple[str, Loaded]:
    """Add `sorted: true` where it is useful and proved, and a comment where it is only useful."""
    promises = family(loaded.spec.kernel).promises
    useful = promises(loaded) if promises is not None else ()
    if not useful:
        return text, loaded
    text = spec.promised(useful).text()
    loaded = loads(text, file)
    render_spec(loaded)
    return text, loaded


def _at_the_source(error: KgenError, spec: Spec, text: str) -> None:
    """Raise an error of an expression at the place of its mod, because the spec is not written."""
    lines = text.split("\n")
    for d in error.diagnostics:
        above = [
            f for f in spec.places for line in lines[: d.line or 0] if line.startswith(f"{f}:")
        ]
        if above:
            spec.places[above[-1]].refuse(d.code, d.message, d.hint or "write it in another way")


def _taken(error: KgenError, spec: Spec) -> list[str]:
    """Return the buffers whose names are refused. Diagnostics point at their keys."""
    found = []
    for d in error.diagnostics:
        if (
            d.code in ("reserved-name", "name-taken", "bad-name")
            and d.source is not None
            and d.column is not None
        ):
            name = d.source[d.column - 1 :][: d.length]
            if name in spec.buffers:
                found.append(name)
    return list(dict.fromkeys(found))


def _other(name: str, spec: Spec) -> str:
    parts = [
        part
        for part in "".join(c if c.isascii() and c.isalnum() else "_" for c in name).split("_")
        if part
    ]
    base = "_".join(parts).lower()
    base = base if base[:1].isalpha() else f"x_{base}".rstrip("_")
    new, number = f"{base[:50]}_values", 2
    while new in spec.buffers:
        new, number = f"{base[:50]}_values_{number}", number + 1
    return new


def _buffer(
    buffers: Any, name: str, shape: Shape, dtype: str, grad: bool, said: str, in_order: bool
) -> None:
    one = CommentedMap({"shape": _flow(list(shape)), "dtype": dtype})
    if in_order:
        one["sorted"] = True
    if grad:
        one["grad"] = True
    one.fa.set_flow_style()
    buffers[name] = one
    if said:
        buffers.yaml_set_comment_before_after_key(name, before=_comment(said), indent=2)


def _flow(items: list[Any]) -> Any:
    sequence = CommentedSeq(items)
    sequence.fa.set_flow_style()
    return sequence


def _scalar(text: str) -> Any:
    """Quote an expression that YAML would not read as text."""
    return DoubleQuotedScalarString(text) if _is_special(text) else text


def _is_special(text: str) -> bool:
    read = YAML(typ="safe").load(f"x: {text}\n") if ": " not in text and " #" not in text else None
    return not (isinstance(read, dict) and read.get("x") == text)


def _summary(text: str) -> str:
    """Return one line that is safe at the start of an emitted file."""
    plain = escaped(text).replace("\\", "/").replace("*/", "* /")
    while '"""' in plain:
        plain = plain.replace('"""', '"')
    return plain if len(plain) <= 200 else plain[:197] + "..."


def _comment(text: str) -> str:
    return UserText(text).in_comment()

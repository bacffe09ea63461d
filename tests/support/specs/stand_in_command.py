"""The `kgen` command with stand-ins for loading and targets, which tests writer and command alone.

    python tests/support/specs/stand_in_command.py VERB ...

A spec consists of `key: value` lines. Target `fake` makes `fake.py`, and `fake.cu` if the spec
contains `cuda: yes`. The templates are in `templates/` of the current directory.
"""

from __future__ import annotations

import json
import sys
import types
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from kgen import family
from kgen.diagnostics import Diagnostic, KgenError, MissingError
from kgen.family import Lazy, Runtime, Target
from kgen.spec.user_text import UserText
from kgen.targets import Source
from kgen.targets.template import Template

TEMPLATES = {
    "fake.py.j2": (
        '{% from "_shared.j2" import line %}\n"""{{ summary }}"""\n\n{{ line(formula) }}\n'
    ),
    "fake.cu.j2": "// {{ summary }}\nint cuda;\n",
    "undefined.j2": "{{ nobody_prepared_this }}\n",
    "_shared.j2": "{% macro line(text) %}value = {{ text }}{% endmacro %}\n",
}


@dataclass(frozen=True)
class Text(Template):
    """Template of `fake.py`."""

    template: ClassVar[str] = "fake.py.j2"

    summary: str
    formula: str


@dataclass(frozen=True)
class Undefined(Text):
    """Template that uses an undefined name."""

    template: ClassVar[str] = "undefined.j2"


@dataclass(frozen=True)
class CudaText(Template):
    """Template of `fake.cu`."""

    template: ClassVar[str] = "fake.cu.j2"

    summary: str


@dataclass
class Spec:
    name: str
    kernel: str = "attention"
    summary: UserText = UserText("A stand-in.")  # noqa: RUF009
    formula: str = "1"
    cuda: str = "no"
    license: UserText | None = UserText("Apache-2.0")  # noqa: RUF009
    targets: tuple[tuple[str, bool], ...] = ()

    def model_dump_json(self) -> str:
        return json.dumps(asdict(self), default=repr)

    def model_copy(self, update: dict[str, str]) -> Spec:
        return replace(self, **update)


@dataclass
class Loaded:
    path: Path
    text: str
    spec: Spec
    trees: dict[str, object] = field(default_factory=dict)
    called: dict[str, str] = field(default_factory=dict)
    variant: str = ""

    @property
    def folder(self) -> str:
        return self.spec.name


def load_variants(path: Path) -> list[Loaded]:
    text = Path(path).read_text(encoding="utf-8")
    fields = dict(line.split(": ", 1) for line in text.splitlines())
    if "name" not in fields:
        raise KgenError(
            Diagnostic("no-name", "a spec needs a name", file=str(path), line=1, column=1)
        )
    words = {key: UserText(fields.pop(key)) for key in ("summary", "license") if key in fields}
    targets = tuple((target, True) for target in fields.pop("targets", "fake").split())
    return [Loaded(Path(path), text, Spec(**fields, **words, targets=targets))]


def sources(loaded: Loaded) -> list[Source]:
    spec = loaded.spec
    if spec.formula == "bug":
        raise ZeroDivisionError("by the stand-in")
    if spec.formula == "unsupported":
        raise KgenError(Diagnostic("unsupported", "fake cannot do this", file=str(loaded.path)))
    if spec.formula == "interrupt":
        raise KeyboardInterrupt
    form = Undefined if spec.formula == "undefined" else Text
    text = form(spec.summary.in_docstring(), spec.formula)
    made = [Source("fake.py", text, alone=text)]
    if spec.cuda == "yes":
        comment = CudaText(spec.summary.in_comment())
        made.append(Source("fake.cu", comment, comment="//"))
    return made


def other_sources(loaded: Loaded) -> list[Source]:
    return [Source("other.py", Text("The other.", loaded.spec.formula))]


def verify_specs(
    loaded: list[Loaded], generated: Path, *_: object, **__: object
) -> list[dict[str, object]]:
    formula = loaded[0].spec.formula
    if formula == "no torch":
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    if formula == "no device":
        raise MissingError(Diagnostic("no-device", "there is no CUDA device"))
    ok = formula != "wrong"
    row = {
        "spec": loaded[0].spec.name,
        "pass": "forward",
        "case": "a",
        "ok": ok,
        "error": float("nan"),
    }
    return [row | {"eager": 1e-3, "ratio": 1.0, "seconds": 0.5, "message": None}]


def stand_in(name: str, **contents: object) -> None:
    module = types.ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module


def install() -> None:
    from kgen.render import environment

    own = family.targets_of("attention")
    others = {
        name: Target(
            Runtime(imports=()), Lazy(f"standin_{name}:sources"), emits=f"One `{name}.py`."
        )
        for name in ("fake", "other")
    }
    found = family.targets_of
    family.targets_of = lambda name: {**own, **others} if name == "attention" else found(name)
    stand_in("standin_fake", sources=sources)
    stand_in("standin_other", sources=other_sources)
    stand_in("kgen.spec.load", load_variants=load_variants)
    stand_in("kgen.verify.verifying", verify_specs=verify_specs)
    environment.template_root = lambda: Path("templates").resolve()


if __name__ == "__main__":
    install()
    from kgen.cli import main

    main()

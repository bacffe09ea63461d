"""Repositories for Hugging Face's kernel hub: the parts that depend on no family.

The format is that of `kernel-builder` and `kernels` 0.17 (`build.toml`, edition 5). kernel-builder
writes `_ops.py` into each build, with the namespace in which the build registers operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kgen.diagnostics import Diagnostic, KgenError
from kgen.family import family
from kgen.pages.markdown import fenced
from kgen.render.adapters import Adapter
from kgen.render.rendering import render_source, render_text, render_variants
from kgen.spec.load import Loaded
from kgen.spec.source import Document
from kgen.spec.user_text import UserText
from kgen.targets import (
    Source,
    asked_targets,
    callable_files,
    opening,
    opening_in_markdown,
    sources,
)
from kgen.targets.launching import FILENAME, launch_file_with
from kgen.targets.template import Template

ALLOWED = (None, "cutlass")
"""The packages that a target may import on the hub, apart from torch and triton."""
KERNELS = "_kernels"
"""The folder of the emitted files in the package.

kernel-builder refuses a folder with the name of the package.
"""


@dataclass(frozen=True)
class OwnNamespace(Template):
    """Functions that register operators in the namespace of a build, `torch.ops.<id>`."""

    template: ClassVar[str] = "hub/_registry.j2"

    name: str
    package: str
    """The package that contains `_ops.py`, relative to the file: `..`."""
    suffix: str
    """The end of the operators' names, which differs in each variant of a spec."""


@dataclass(frozen=True)
class Package(Template):
    """Values for `__init__.py` of the package."""

    template: ClassVar[str] = "hub/package.j2"

    name: str
    summary: str
    repository: str
    call: str
    folder: str
    offers: list[str]
    """The names that the package imports from the folder of the emitted files."""
    names: list[str]
    """The public names of the package."""
    left_out: str
    """Files that the hub does not allow."""
    more: Template | None
    """Further functions, for callers with an interface of their own."""


@dataclass(frozen=True)
class Layer(Template):
    """Values for `layers.py`: the function as a stateless module."""

    template: ClassVar[str] = "hub/layers.j2"

    name: str
    layer: str
    """The name of the class."""
    words: str
    """A sentence about the tensors that the layer takes and reads."""
    signature: str
    """The parameters of `forward` after `self`."""
    arguments: list[str]
    gradients: bool
    eps: bool
    """True if the layer reads the epsilon of the module that it replaces."""


@dataclass(frozen=True)
class BuildFile(Template):
    """Values for `build.toml`."""

    template: ClassVar[str] = "hub/build.toml.j2"

    repository: str
    license: str


@dataclass(frozen=True)
class Flake(Template):
    """Values for `flake.nix`."""

    template: ClassVar[str] = "hub/flake.nix.j2"

    name: str


@dataclass(frozen=True)
class Ignored(Template):
    """Values for `.gitignore`: the files that kernel-builder writes."""

    template: ClassVar[str] = "hub/gitignore.j2"

    name: str


@dataclass(frozen=True)
class Card(Template):
    """Values for `CARD.md`, a template of kernel-builder."""

    template: ClassVar[str] = "hub/card.md.j2"

    name: str
    paragraph: str
    call: str
    layer: str
    further: str
    """A paragraph about further functions; empty if there are none."""
    gradients: bool
    left_out: str
    yaml: str
    """The spec as a block of code."""


@dataclass(frozen=True)
class Parts:
    """The parts of a repository that depend on the family."""

    layer: Template
    tests: Template
    benchmark: Template
    more: Template | None = None
    more_names: tuple[str, ...] = ()
    further: str = ""


@dataclass(frozen=True)
class Repository:
    """A repository of one spec, with the variants that contain only files that the hub allows."""

    given: Sequence[Loaded]
    variants: Sequence[Loaded]
    left_out: tuple[str, ...]
    """Names of files that the hub does not allow."""

    @property
    def name(self) -> str:
        """The name of the function and of the package."""
        return str(self.variants[0].spec.name)

    @property
    def repository(self) -> str:
        """The name of the repository."""
        return self.name.replace("_", "-")

    @property
    def layer(self) -> str:
        """The name of the layer: `RmsNorm` for `rms_norm`."""
        return "".join(part.capitalize() for part in self.name.split("_"))

    @property
    def file(self) -> Source:
        """The default file with the function, for the first variant."""
        first = self.variants[0]
        return callable_files(s for t in asked_targets(first) for s in sources(first, t))[0]

    @property
    def offers(self) -> list[str]:
        """The public names of the folder with the emitted files."""
        further = () if self.variants[0].variant else self.file.offers
        return [self.name, *further]

    @property
    def gradients(self) -> bool:
        """True if there is a backward pass."""
        return "backward" in self.variants[0].spec.passes


def repository_of(variants: Sequence[Loaded]) -> Repository:
    """Return the repository of a spec.

    Raise `KgenError` if kernel-builder refuses its name, or if the hub allows none of its files.
    """
    first = variants[0]
    if len(first.spec.name) < 2:  # the names of specs fulfil all other rules of kernel-builder
        message = f"the kernel hub has no repositories with the name `{first.spec.name}`"
        raise KgenError([_at(first, "name", message, "use at least two letters or digits")])
    targets = family(first.spec.kernel).targets
    out = [t for t in asked_targets(first) if targets[t].runtime.needs not in ALLOWED]
    if len(out) == len(asked_targets(first)):
        needs = " and ".join(str(targets[target].runtime.needs) for target in out)
        message = f"the kernel hub allows no file of this spec: they need the package {needs}"
        raise KgenError([_at(first, "targets", message, "add the target `triton`")])
    files = dict.fromkeys(s.filename for one in variants for t in out for s in sources(one, t))
    return Repository(variants, [_without(one, out) for one in variants], tuple(files))


def repository(made: Repository, parts: Parts) -> Adapter:
    """Return `<name>_hub`: the package below `torch-ext`, which kgen updates, and initial files."""
    name, first = made.name, made.variants[0]
    root, package = f"{name}_hub", f"{name}_hub/torch-ext/{name}"
    init = Package(
        name=name,
        summary=opening(first.spec),
        repository=made.repository,
        call=made.file.signature.usage,
        folder=KERNELS,
        offers=made.offers,
        names=[*made.offers, *parts.more_names, "layers"],
        left_out=_and(made.left_out),
        more=parts.more,
    )
    texts = {"__init__.py": init, "layers.py": parts.layer}
    folders: dict[str, Mapping[str, str]] = {
        package: {n: render_source(made.variants, Source(n, text)) for n, text in texts.items()}
    }
    for folder, files in render_variants(made.variants, change=_in_namespace).items():
        folders[f"{package}/{KERNELS}{folder.removeprefix(name)}"] = files
    started: dict[str, Template] = {
        f"{root}/build.toml": BuildFile(made.repository, first.spec.license.in_comment()),
        f"{root}/flake.nix": Flake(name),
        f"{root}/.gitignore": Ignored(name),
        f"{root}/CARD.md": _card(made, parts),
        f"{root}/tests/test_{name}.py": parts.tests,
        f"{root}/benchmarks/benchmark.py": parts.benchmark,
    }
    initial = {path: render_text(first, template) for path, template in started.items()}
    return Adapter(folders, initial, tuple(made.variants), remarks=tuple(_remarks(made)))


def in_card(text: str) -> str:
    """Return text that kernel-builder prints unchanged when it fills the template of the card."""
    opens = zip(text, f"{text[1:]} ", strict=True)
    return "".join('{{ "{" }}' if a == "{" and b in "{%#" else a for a, b in opens)


def _card(made: Repository, parts: Parts) -> Card:
    first = made.variants[0]
    text = "\n".join(line.in_comment() for line in UserText(first.text).lines())
    return Card(
        name=made.name,
        paragraph=in_card(opening_in_markdown(first.spec)),
        call=made.file.signature.usage,
        layer=made.layer,
        further=parts.further,
        gradients=made.gradients,
        left_out=_and([f"`{name}`" for name in made.left_out]),
        yaml=in_card(fenced(text, "yaml")),
    )


def _remarks(made: Repository) -> Iterable[str]:
    if made.left_out:
        files = _and(made.left_out)
        yield (
            f"{made.name}_hub: {files} left out, because the kernel hub does not allow the package "
            "cuda-core"
        )


def _without(loaded: Loaded, out: Iterable[str]) -> Loaded:
    """Return a spec without some of its targets."""
    targets: Any = loaded.spec.targets.model_copy(update=dict.fromkeys(out))
    return replace(loaded, spec=loaded.spec.model_copy(update={"targets": targets}))


def _in_namespace(loaded: Loaded, source: Source) -> Source:
    """Return a source that registers its operators in the namespace of the build."""
    if source.filename != FILENAME:
        # kernel-builder refuses `register_fake` of an operator that it cannot see the name of.
        return replace(source, register_fake="_LIBRARY.fake({})")
    suffix = f"_{loaded.variant}" if loaded.variant else ""
    package = "..." if loaded.variant else ".."
    registry = OwnNamespace(loaded.spec.name, package, suffix)
    return replace(source, text=launch_file_with(registry), shared=False)


def _at(loaded: Loaded, field: str, message: str, hint: str) -> Diagnostic:
    document = Document(loaded.text, loaded.path.as_posix())
    return document.value("no-adapter", message, (field,), hint)


def _and(names: Sequence[str]) -> str:
    """Return the names as a list in words: `a`, `a and b`, or `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))

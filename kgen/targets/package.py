"""`__init__.py` of an emitted folder: the spec's function, from the fastest of its files that can
run.

Several files may offer that function, one for each target or architecture
(docs/decisions/0023-emitted-folders.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar

from kgen.family import family
from kgen.targets import Source, callable_files, opening
from kgen.targets.folding import COLUMNS
from kgen.targets.template import Template

if TYPE_CHECKING:
    from kgen.spec.load import Loaded

LEAST = (8, 0)
"""The least compute capability of files without a fixed architecture."""


@dataclass(frozen=True)
class VariantChoice:
    """A variant of the spec, and the condition of its `if` or `elif`."""

    keyword: str
    condition: str
    variant: str


@dataclass(frozen=True)
class FileChoice:
    """A file that cannot run every call, and the condition of its `if` or `elif`."""

    keyword: str
    condition: str
    file: str
    needs: str
    """The package without which the file cannot be imported."""
    runs: str
    """The condition that the file can run on a `device`."""


@dataclass(frozen=True)
class OneFile(Template):
    """`__init__.py` of a folder in which one file runs every call."""

    template: ClassVar[str] = "package_of_file.j2"

    name: str
    summary: str
    file: str
    imported: list[str]
    """The lines that import the public names of the file."""
    exported: list[str]
    """The lines that list these names in `__all__`."""


def _one_file(name: str, summary: str, file: str, offers: Sequence[str]) -> OneFile:
    quoted = [f'"{offer}"' for offer in offers]
    imported = _listed(f"from .{file} import ", offers, ("", ""), ("(", ")"))
    exported = _listed("__all__ = ", quoted, ("[", "]"), ("[", "]"))
    return OneFile(name, summary, file, imported, exported)


def _listed(
    head: str, names: Sequence[str], flat: tuple[str, str], broken: tuple[str, str]
) -> list[str]:
    """Return a statement with a list of names, on one line if it has at most 120 columns."""
    line = f"{head}{flat[0]}{', '.join(names)}{flat[1]}"
    if len(line) <= COLUMNS:
        return [line]
    return [f"{head}{broken[0]}", *(f"    {name}," for name in names), broken[1]]


@dataclass(frozen=True)
class Files(Template):
    """`__init__.py` of a folder that chooses between several files at each call."""

    template: ClassVar[str] = "package.j2"

    name: str
    summary: str
    words: list[str]
    """Each file, and when it runs."""
    argument_lines: Template | None
    """The part of the docstring on arguments."""
    signature: str
    tensors: list[str]
    """The positional parameters."""
    arguments: list[str]
    """Every parameter, as an argument of the function that was chosen."""
    choices: list[FileChoice]
    last: str | None
    """The file that runs all other calls; None if there is none."""
    otherwise: str
    """The statement for all other calls: an import, or the error."""
    gradients: bool
    """True if the choice depends on gradients, because a file has no backward pass."""


@dataclass(frozen=True)
class Variants(Template):
    """`__init__.py` of a folder that contains a folder for each variant of a spec."""

    template: ClassVar[str] = "variants.j2"

    name: str
    summary: str
    words: list[str]
    """Each variant, and the tensors that it accepts."""
    argument_lines: Template | None
    """The part of the docstring on arguments."""
    signature: str
    arguments: list[str]
    """Every parameter, as an argument of the function that was chosen."""
    dtypes: list[str]
    """The dtypes of all variants in Python; empty if all have the same."""
    choices: list[VariantChoice]
    refusal: str

    @property
    def first(self) -> str:
        """The first variant. All variants have its arguments."""
        return self.choices[0].variant


def package(loaded: Loaded, sources: Sequence[Source]) -> Source | None:
    """Return `__init__.py` for the files of all targets; None if no file has the function."""
    spec, files = loaded.spec, callable_files(sources)
    if not files:
        return None
    tried = list(_tried(files))
    if _runs_anywhere(tried[0]):
        text: Template = _one_file(
            spec.name, opening(spec), _stem(tried[0]), [spec.name, *tried[0].offers]
        )
    else:
        text = _of_files(spec, tried)
    return Source("__init__.py", text)


def choosing(variants: Sequence[tuple[Loaded, Iterable[Source]]]) -> Source | None:
    """Return `__init__.py` for the folder of all variants; None if a variant has no file with the
    function.
    """
    first = variants[0][0]
    files = [callable_files(sources)[:1] for _, sources in variants]
    if not all(files):
        return None
    spec, varies = first.spec, family(first.spec.kernel).varies
    (signature,) = {file.signature for (file,) in files}
    fields = first.listed
    conditions = [
        " and ".join(f"{varies[f].told} == {varies[f].literal(one.spec)}" for f in fields)
        for one, _ in variants
    ]
    got = " and ".join(f"{varies[f].words} {{{varies[f].told}}}" for f in fields)
    there = ", ".join(one.variant for one, _ in variants)
    return Source(
        "__init__.py",
        Variants(
            name=spec.name,
            summary=opening(spec),
            words=[f"{one.variant}, {_of_variant(one, fields)}" for one, _ in variants],
            argument_lines=files[0][0].docstring,
            signature=str(signature),
            arguments=signature.arguments,
            dtypes=_dtypes(variants) if "dtype" in fields else [],
            choices=[
                VariantChoice(_keyword(number), condition, one.variant)
                for number, ((one, _), condition) in enumerate(
                    zip(variants, conditions, strict=True)
                )
            ],
            refusal=f'raise ValueError(f"{spec.name}: there are {there}, and nothing for {got}")',
        ),
    )


def _dtypes(variants: Sequence[tuple[Loaded, Iterable[Source]]]) -> list[str]:
    """Return the dtypes of all variants, in Python."""
    varies = family(variants[0][0].spec.kernel).varies
    return list(dict.fromkeys(varies["dtype"].literal(one.spec) for one, _ in variants))


def _of_variant(one: Loaded, fields: Iterable[str]) -> str:
    """Describe the tensors that a variant accepts."""
    varies = family(one.spec.kernel).varies
    return ", ".join(f"{varies[f].words} {varies[f].literal(one.spec)}" for f in fields)


def _of_files(spec: Any, tried: Sequence[Source]) -> Files:
    """Return the template that runs the first file that can run.

    The last one may run every call.
    """
    last = tried[-1] if _runs_anywhere(tried[-1]) else None
    choices = [file for file in tried if file is not last]
    gradients = "backward" in spec.passes and any(file.forward_only for file in tried)
    (signature,) = {file.signature for file in tried}
    tensors = signature.tensors
    refusal = (
        f'raise ValueError(f"{spec.name}: no file of this folder runs on {{{tensors[0]}.device}}")'
    )
    return Files(
        name=spec.name,
        summary=opening(spec),
        words=[_words(file, gradients) for file in tried],
        # The last file runs every call that the others run, so its docstring is valid for the whole
        # folder.
        argument_lines=tried[-1].docstring,
        signature=str(signature),
        tensors=[*tensors],
        arguments=signature.arguments,
        choices=[
            _file_choice(file, number, gradients, tensors[0]) for number, file in enumerate(choices)
        ],
        last=_stem(last) if last else None,
        otherwise=f"from .{_stem(last)} import {spec.name} as function" if last else refusal,
        gradients=gradients,
    )


def _file_choice(file: Source, number: int, gradients: bool, tensor: str) -> FileChoice:
    """Return a file with the condition that it can run on the device of a tensor."""
    condition = f"_runs_{_stem(file)}({tensor}.device)"
    if gradients and file.forward_only:
        condition = f"not gradients and {condition}"
    return FileChoice(_keyword(number), condition, _stem(file), file.needs or "torch", _runs(file))


def _keyword(number: int) -> str:
    """Return the keyword of branch `number`, counted from 0."""
    return "elif" if number else "if"


def _stem(file: Source) -> str:
    return PurePath(file.filename).stem


def _runs_anywhere(file: Source) -> bool:
    return file.arch is None and file.needs is None


def _tried(files: Sequence[Source]) -> Iterator[Source]:
    """Yield the files up to the first that runs on any device and for every call."""
    for file in files:
        yield file
        if _runs_anywhere(file):
            return


def _runs(file: Source) -> str:
    """The condition that a file can run on a device, as Python."""
    wanted = f"== {_capability(file.arch)}" if file.arch else f">= {LEAST}"
    return f'_THERE["{_stem(file)}"] and _capability(device) {wanted}'


def _words(file: Source, gradients: bool) -> str:
    """Describe a file and its requirements."""
    words = [f"{_stem(file)}.py"]
    if not _runs_anywhere(file):
        major, minor = _capability(file.arch) if file.arch else LEAST
        words.append(f"on compute capability {major}.{minor}" + " or newer" * (file.arch is None))
    if file.needs:
        words.append(f"with the package {file.needs}")
    if gradients and file.forward_only:
        words.append("if no gradient is required")
    return ", ".join(words)


def _capability(arch: str) -> tuple[int, int]:
    """Return (9, 0) for sm_90a."""
    digits = arch.removeprefix("sm_").rstrip("af")
    return int(digits[:-1]), int(digits[-1])

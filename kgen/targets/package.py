"""`__init__.py` of an emitted folder: the spec's function, from the fastest of its files that can run.

Several files may offer that function, one for each target or architecture
(docs/decisions/one-function-for-a-folder.md).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from kgen.family import family
from kgen.targets import Source, callable_files, opening
from kgen.targets.template import Untyped

if TYPE_CHECKING:
    from kgen.spec.load import Loaded

LEAST = (8, 0)
"""The compute capability that files need which are for every architecture of a CUDA device."""


def package(loaded: Loaded, sources: Sequence[Source]) -> Source | None:
    """The source of `__init__.py`, given those of all targets of a spec; None where no file has the function."""
    spec, files = loaded.spec, callable_files(sources)
    if not files:
        return None
    tried = list(_tried(files))
    last = tried[-1] if _runs_anywhere(tried[-1]) else None
    choices = [file for file in tried if file is not last]
    offers = [spec.name, *(last.offers if last else ())]
    fields: dict[str, object] = {
        "name": spec.name,
        "summary": opening(spec),
        "file": last and _stem(last),
        "offers": offers,
        "quoted": [f'"{offered}"' for offered in offers],
        "words": [_words(file, gradients=False) for file in tried],
        "choices": [],
    }
    if choices:
        # The last file serves everything that the others do, so its words hold for the whole folder.
        fields |= {"argument_lines": tried[-1].docstring} | _choice(spec, choices, last)
    return Source("__init__.py", Untyped("package.j2", fields))


def choosing(variants: Sequence[tuple[Loaded, Iterable[Source]]]) -> Source | None:
    """The source of `__init__.py` of a folder whose folders are the variants of a spec, given each with its sources;
    None where no file has the function."""
    (first, _), files = variants[0], [callable_files(sources)[:1] for _, sources in variants]
    if not all(files):
        return None
    spec, varies = first.spec, family(first.spec.kernel).varies
    (signature,) = {file.signature for (file,) in files}
    positional, keywords = _parameters(signature)
    fields = first.listed
    tests = [
        " and ".join(f"{varies[f].told} == {varies[f].literal(one.spec)}" for f in fields)
        for one, _ in variants
    ]
    got = " and ".join(f"{varies[f].words} {{{varies[f].told}}}" for f in fields)
    there = ", ".join(one.variant for one, _ in variants)
    return Source(
        "__init__.py",
        Untyped(
            "variants.j2",
            {
                "name": spec.name,
                "argument_lines": files[0][0].docstring,
                "summary": opening(spec),
                "words": [f"{one.variant}, {_of_variant(one, fields)}" for one, _ in variants],
                "dtypes": _dtypes(variants) if "dtype" in fields else [],
                "choices": [
                    {"word": "elif" if number else "if", "variant": one.variant, "test": tests[number]}
                    for number, (one, _) in enumerate(variants)
                ],
                "refusal": f'raise ValueError(f"{spec.name}: there are {there}, and nothing for {got}")',
                "signature": signature,
                "arguments": ", ".join([*positional, *(f"{name}={name}" for name in keywords)]),
                "first": variants[0][0].variant,
            },
        ),
    )


def _dtypes(variants: Sequence[tuple[Loaded, Iterable[Source]]]) -> list[str]:
    """The dtypes of all variants, in Python."""
    varies = family(variants[0][0].spec.kernel).varies
    return list(dict.fromkeys(varies["dtype"].literal(one.spec) for one, _ in variants))


def _of_variant(one: Loaded, fields: Iterable[str]) -> str:
    """What tensors it takes."""
    varies = family(one.spec.kernel).varies
    return ", ".join(f"{varies[f].words} {varies[f].literal(one.spec)}" for f in fields)


def _choice(spec: Any, choices: Sequence[Source], last: Source | None) -> dict[str, object]:
    """How one of several files is chosen, `last` where none of the others runs."""
    files = [*choices, *([last] if last else [])]
    gradients = "backward" in spec.passes and any(file.forward_only for file in files)
    (signature,) = {file.signature for file in files}
    positional, keywords = _parameters(signature)
    refusal = f'raise ValueError(f"{spec.name}: no file of this folder runs on {{{positional[0]}.device}}")'
    return {
        "words": [_words(file, gradients) for file in files],
        "choices": [
            {
                "word": "elif" if number else "if",
                "file": _stem(file),
                "needs": file.needs or "torch",
                "runs": _runs(file),
                "test": "not gradients and " * (gradients and file.forward_only)
                + f"_runs_{_stem(file)}({positional[0]}.device)",
            }
            for number, file in enumerate(choices)
        ],
        "last": last and _stem(last),
        "otherwise": f"from .{_stem(last)} import {spec.name} as function" if last else refusal,
        "gradients": gradients,
        "signature": signature,
        "tensors": ", ".join(positional),
        "arguments": ", ".join([*positional, *(f"{name}={name}" for name in keywords)]),
    }


def _stem(file: Source) -> str:
    return PurePath(file.filename).stem


def _runs_anywhere(file: Source) -> bool:
    return file.arch is None and file.needs is None


def _tried(files: Sequence[Source]) -> Iterator[Source]:
    """The files up to the first that takes any device and every call: none behind it would be asked."""
    for file in files:
        yield file
        if _runs_anywhere(file):
            return


def _runs(file: Source) -> str:
    """Whether a file can run on a device, as Python."""
    wanted = f"== {_capability(file.arch)}" if file.arch else f">= {LEAST}"
    return f'_THERE["{_stem(file)}"] and _capability(device) {wanted}'


def _words(file: Source, gradients: bool) -> str:
    """A file, and what it takes to run it."""
    words = [f"{_stem(file)}.py"]
    if not _runs_anywhere(file):
        major, minor = _capability(file.arch) if file.arch else LEAST
        words.append(f"on compute capability {major}.{minor}" + " or newer" * (file.arch is None))
    if file.needs:
        words.append(f"with the package {file.needs}")
    if gradients and file.forward_only:
        words.append("where no gradient is asked for")
    return ", ".join(words)


def _capability(arch: str) -> tuple[int, int]:
    """(9, 0) of sm_90a."""
    digits = arch.removeprefix("sm_").rstrip("af")
    return int(digits[:-1]), int(digits[-1])


def _parameters(signature: str) -> tuple[list[str], list[str]]:
    """The names in a signature: positional ones, which are tensors, and those after the `*`."""
    function = ast.parse(f"def f({signature}): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    return [a.arg for a in function.args.args], [a.arg for a in function.args.kwonlyargs]

"""Names of a context-parallel package that a spec cannot have."""

from __future__ import annotations

import symtable
from collections.abc import Iterator
from pathlib import Path

import pytest

from kgen.diagnostics import KgenError
from kgen.kernels.attention.adapt.context_parallel import adapter
from kgen.kernels.attention.adapt.context_parallel_template import IN_FUNCTIONS, IN_MODULE
from kgen.spec.load import loads_variants

START = """kernel: attention
name: {name}
dtype: {dtype}
head_dim: 16
"""
LEARNED = """sinks: true
varlen: {varlen}
buffers: {{given_learned: {{shape: [HQ], dtype: fp32, grad: true}}}}
params: {{given_number: {{type: int, runtime: true}}, given_real: {{type: float, runtime: true}}}}
score_mod: score * given_real + given_learned[h]
mask_mod: q_idx >= kv_idx - given_number
"""
DOCUMENTS = """buffers:
  given_document: {shape: [B, SQ], dtype: int32, sorted: true}
  given_ends: {shape: [any], dtype: int32}
mask_mod: |
  given_document[b, q_idx] == given_document[b, kv_idx] and kv_idx < given_ends[min(h, 1)]
"""
CHOICE = """params: {given_number: {type: int, runtime: true}}
mask_mod: kv_idx <= (q_idx if q_idx < given_number else given_number)
"""
PROBES = {
    "learned": LEARNED.format(varlen="false"),
    "packed": LEARNED.format(varlen="true"),
    "documents": DOCUMENTS,
    "choice": CHOICE,
}


def package(rest: str, name: str = "own", dtype: str = "bf16") -> str:
    """Return `__init__.py` of a spec's package."""
    variants = loads_variants(START.format(name=name, dtype=dtype) + rest, Path("own.yaml"))
    return adapter(variants).folders[f"{name}_context_parallel"]["__init__.py"]


def scopes(text: str) -> Iterator[frozenset[str]]:
    """Yield the names of each scope of a file."""
    left = [symtable.symtable(text, "", "exec")]
    for scope in left:  # the list grows during the loop
        left += scope.get_children()
        yield frozenset(scope.get_identifiers())


def found(kind: str) -> set[str]:
    """Return the public names of scopes with a name of a kind, without the names of that kind."""
    texts = [package(rest) for rest in PROBES.values()]
    texts += [package(rest, dtype="[bf16, fp16]") for rest in PROBES.values()]
    names = set[str]()
    for scope in (scope for text in texts for scope in scopes(text)):
        own = {name for name in scope if name.removeprefix("d").startswith(kind)}
        names |= {name for name in scope - own if not name.startswith("_")} if own else set()
    return names


def test_the_names_of_the_package_are_known() -> None:
    assert found("own") == IN_MODULE
    assert found("given_") == IN_FUNCTIONS


@pytest.mark.parametrize("name", ["cache", "first_at_least"])
def test_a_function_cannot_have_a_name_of_the_module(name: str) -> None:
    with pytest.raises(KgenError, match=f"`{name}` is already a name in the package"):
        package(PROBES["documents"], name)


@pytest.mark.parametrize("name", ["back", "ctx", "first_at_least"])
def test_a_buffer_cannot_have_a_name_of_the_functions(name: str) -> None:
    with pytest.raises(KgenError, match=f"`{name}` is already a name in the package"):
        package(PROBES["documents"].replace("given_document", name))


def test_other_names_are_free() -> None:
    assert "def own(" in package(PROBES["learned"])
    assert "def given_learned(" in package(PROBES["documents"], "given_learned")

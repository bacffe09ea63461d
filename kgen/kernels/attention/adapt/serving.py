"""Adapters for vLLM and SGLang: packages whose `register` adds an attention backend.

The package is installable, and has an entry point through which the engine calls `register`. The
constants of the spec are in `backend.py`, which compares them with each layer of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.attention.adapt.engines import SGLANG, VLLM, Engine, Served, served
from kgen.kernels.attention.adapt.shared import Head, head_of
from kgen.render.adapters import Adapter
from kgen.render.rendering import render_source, render_variants
from kgen.spec.load import Loaded
from kgen.targets import Source, opening
from kgen.targets.template import Template, filled
from kgen.targets.triton.text import TORCH_DTYPES

NO_WINDOW = "2**30"
"""The run-time window of layers that have none. It exceeds every distance of a query and a key."""
CACHES = {
    "bf16": ("auto", "bfloat16"),
    "fp16": ("auto", "float16"),
    "fp8_e4m3": ("fp8", "fp8_e4m3"),
    "fp8_e5m2": ("fp8_e5m2",),
}
"""vLLM's names of the dtypes of a cache."""
STORED = {**TORCH_DTYPES, "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""The dtypes of a cache in PyTorch."""
OF_VLLM = (
    "Called with vLLM 0.24.0 and 0.33.0, on the CPU in Triton's interpreter.",
    "Untested: a GPU, a server, CUDA graphs, several GPUs, speculative decoding.",
)
OF_SGLANG = (
    "Called with SGLang 0.5.23, on the CPU in Triton's interpreter.",
    "Untested: a GPU, a server, CUDA graphs, several GPUs.",
)


@dataclass(frozen=True)
class VllmRegister(Template):
    """The function `register` for vLLM."""

    template: ClassVar[str] = "attention/adapters/vllm_register.j2"

    package: str


@dataclass(frozen=True)
class SglangRegister(Template):
    """The function `register` for SGLang."""

    template: ClassVar[str] = "attention/adapters/sglang_register.j2"

    name: str
    package: str


@dataclass(frozen=True)
class Init(Template):
    """Values for `__init__.py`. It imports no engine, so that every process can load it."""

    template: ClassVar[str] = "attention/adapters/engine_init.j2"

    opening: str
    label: str
    layers: str
    usage: list[str]
    register: Template


@dataclass(frozen=True)
class Project(Template):
    """Values for `pyproject.toml`."""

    template: ClassVar[str] = "attention/adapters/engine_pyproject.toml.j2"

    label: str
    distribution: str
    """The name of the package for pip."""
    package: str
    group: str
    """The group of entry points that the engine loads."""


@dataclass(frozen=True)
class Layers:
    """The layers that the kernels fit, for `backend.py` of both engines."""

    name: str
    opening: str
    layers: str
    """A description of the layers that the kernels fit."""
    tested: tuple[str, ...]
    head: Head
    group: int | None
    window: int | None
    any_window: bool
    """True if the window is a parameter of the kernels."""
    softcap: float
    sinks: bool
    dtype: str
    cache_dtype: str
    quantized: bool
    scales: list[str]
    """Further arguments of the function that writes into the cache."""
    given: list[str]
    """Further arguments of the function that computes attention."""


@dataclass(frozen=True)
class VllmBackend(Layers, Template):
    """Further values for vLLM."""

    template: ClassVar[str] = "attention/adapters/vllm.j2"

    slopes: bool
    windowed: bool
    """True if some layers may have a window."""
    deterministic: bool
    caches: str
    """Python code of a tuple."""
    capability: list[str]
    """The lowest compute capability: two numbers."""
    columns: int
    """Columns of keys and values together."""
    no_window: str


@dataclass(frozen=True)
class SglangBackend(Layers, Template):
    """The values for SGLang."""

    template: ClassVar[str] = "attention/adapters/sglang.j2"


def vllm_adapter(variants: Sequence[Loaded]) -> Adapter:
    """Return the package `<name>_vllm`, which is vLLM's attention backend CUSTOM.

    Raise `KgenError` if layers of vLLM cannot call the spec.
    """
    found = served(variants, VLLM)
    spec, package = found.spec, f"{found.spec.name}_vllm"
    scales = ["k_scale=layer._k_scale", "v_scale=layer._v_scale"] if spec.kv_dtype else []
    given = [*(["sinks=self._sinks"] if spec.sinks else []), *scales]
    given += [f"{found.slopes}=self._slopes"] if found.slopes else []
    given += [f"{found.window_param}=self._window"] if found.window_param else []
    backend = filled(
        VllmBackend,
        _layers(found, OF_VLLM, scales, given),
        slopes=found.slopes is not None,
        windowed=found.window is not None or found.window_param is not None,
        deterministic=spec.deterministic == "batch",
        caches=repr(CACHES[spec.kv_dtype or spec.dtype]),
        capability=["8", "9" if spec.kv_dtype == "fp8_e4m3" else "0"],
        columns=spec.head_dim.qk + spec.head_dim.v,
        no_window=NO_WINDOW,
    )
    usage = [
        f"pip install ./{package}",
        f"VLLM_PLUGINS={package} vllm serve MODEL --attention-backend CUSTOM",
    ]
    init = _init(found, VLLM, usage, VllmRegister(package))
    return _adapter(found, VLLM, init, backend, "vllm.general_plugins")


def sglang_adapter(variants: Sequence[Loaded]) -> Adapter:
    """Return the package `<name>_sglang`, which adds an attention backend to SGLang.

    Raise `KgenError` if layers of SGLang cannot call the spec.
    """
    found = served(variants, SGLANG)
    spec, package = found.spec, f"{found.spec.name}_sglang"
    scales = ["k_scale=k_scale", "v_scale=v_scale"] if spec.kv_dtype else []
    given = [*(["sinks=sinks"] if spec.sinks else []), *scales]
    if found.window_param:
        given.append(f"{found.window_param}=_window(layer) or {NO_WINDOW}")
    backend = filled(SglangBackend, _layers(found, OF_SGLANG, scales, given))
    usage = [
        f"pip install ./{package}",
        f"python -m sglang.launch_server --attention-backend {spec.name} --page-size 64 ...",
    ]
    init = _init(found, SGLANG, usage, SglangRegister(spec.name, package))
    return _adapter(found, SGLANG, init, backend, "sglang.srt.plugins")


def _layers(found: Served, tested: tuple[str, ...], scales: list[str], given: list[str]) -> Layers:
    spec = found.spec
    return Layers(
        name=spec.name,
        opening=opening(spec),
        layers=found.words,
        tested=tested,
        head=head_of(spec),
        group=None if spec.gqa == "any" else spec.gqa,
        window=found.window,
        any_window=found.window_param is not None,
        softcap=found.softcap or 0.0,
        sinks=spec.sinks,
        dtype=f"torch.{TORCH_DTYPES[spec.dtype]}",
        cache_dtype=f"torch.{STORED[spec.kv_dtype or spec.dtype]}",
        quantized=spec.kv_dtype is not None,
        scales=scales,
        given=given,
    )


def _init(found: Served, engine: Engine, usage: list[str], register: Template) -> Init:
    return Init(opening(found.spec), engine.label, found.words, usage, register)


def _adapter(found: Served, engine: Engine, init: Init, backend: Template, group: str) -> Adapter:
    """Return the package: its files, and a folder with the kernels."""
    package = f"{found.spec.name}_{engine.option}"
    project = Project(engine.label, package.replace("_", "-"), package, group)
    sources = {"__init__.py": init, "backend.py": backend, "pyproject.toml": project}
    loaded = [found.loaded]
    files = {name: render_source(loaded, Source(name, text)) for name, text in sources.items()}
    folders: dict[str, dict[str, str]] = {package: files}
    for folder, texts in render_variants(loaded).items():
        folders[f"{package}/{folder}"] = dict(texts)
    fits = (f"{package} fits {found.words}",)
    return Adapter(folders, specs=(found.loaded,), fits=fits)

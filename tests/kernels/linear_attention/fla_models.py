"""Small random models of transformers with layers of linear attention, their packages, and the
results of training and generation.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kgen.kernels.linear_attention.adapt.fla import adapter
from kgen.spec.load import loads_variants

DELTA = """kernel: linear_attention
name: {name}
dtype: bf16
head_dim: 64
heads: {heads}
buffers: {buffers}
decay: {decay}
rule: delta
beta: sigmoid(b[t, h])
qk_norm: l2
chunk_size: 16
passes: [forward, backward, decode]
"""
SPECS = {
    "qwen3_next": DELTA.format(
        name="my_qwen3_next",
        heads="{group: 2}",
        buffers="{a: {shape: [T, HV], dtype: bf16}, b: {shape: [T, HV], dtype: bf16}}",
        decay="-softplus(a[t, h])",
    ),
    "kimi_linear": DELTA.format(
        name="my_kimi_linear",
        heads="any",
        buffers="{a: {shape: [T, HV, K], dtype: bf16}, b: {shape: [T, HV], dtype: bf16}}",
        decay="-softplus(a[t, h, c])",
    ),
    "mamba2": """kernel: linear_attention
name: my_mamba2
dtype: bf16
head_dim: 64
heads: any
buffers: {dt: {shape: [T, HV], dtype: bf16}, d: {shape: [HV], dtype: fp32}}
decay: -dt[t, h]
beta: dt[t, h]
skip: d[h] * v
scale: 1
chunk_size: 16
""",
}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "eos_token_id": None,
    "initializer_range": 0.3,
}
ATTENTION = {
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 1,
    "tie_word_embeddings": False,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **ATTENTION,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "num_experts": 2,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "mamba2": (
        "Mamba2Config",
        {"num_heads": 2, "head_dim": 64, "state_size": 64, "expand": 2, "n_groups": 1},
    ),
}
"""Models by name: a config, and its values in addition to SIZES."""


def packaged(folder: Path, text: str) -> Any:
    """Write the adapter of a spec into a folder and import it, with Triton's interpreter."""
    from kgen.verify import interpreter

    torch.set_num_threads(1)
    interpreter.mend()
    made = adapter(loads_variants(text, "own.yaml"))
    for inner, files in made.folders.items():
        (folder / inner).mkdir(parents=True)
        for name, content in files.items():
            (folder / inner / name).write_text(content)
    sys.path.insert(0, str(folder))
    return importlib.import_module(next(iter(made.folders)))


def model_of(name: str) -> tuple[Any, Any]:
    """Return a random model in float16, and the module that defines it."""
    import transformers

    config, values = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**SIZES, **values)
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float16)
    return model, importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def results(model: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Return the loss and gradients by name, and generated tokens."""
    torch.manual_seed(1)
    tokens = torch.randint(1, 64, (2, 21))
    model.train().zero_grad()
    out = model(tokens, labels=tokens)
    out.loss.backward()
    found = {"loss": out.loss.detach()}
    found |= {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    generated = model.eval().generate(tokens, max_new_tokens=6, do_sample=False)
    return found, generated


def compared(folder: Path, name: str) -> tuple[dict[str, tuple[float, float]], int, int]:
    """Return the relative errors of the loss and gradients, ours and those of eager in float16.

    Errors are differences from eager in float32. Also return the number of generated tokens that
    differ from eager, and the number of calls.
    """
    package = packaged(folder, SPECS[name].replace("bf16", "fp16"))
    model, module = model_of(name)
    eager, tokens = results(model)
    calls = _counted(package)
    package.register(module)
    ours, generated = results(model)
    package.unregister()
    again, _ = results(model)
    assert all(torch.equal(again[key], eager[key]) for key in eager)
    assert ours.keys() == eager.keys()
    exact, _ = results(model.float())

    def error(x: Tensor, key: str) -> float:
        return float((x.float() - exact[key]).norm() / exact[key].norm().clamp(min=1e-9))

    found = {key: (error(ours[key], key), error(eager[key], key)) for key in exact}
    return found, int((generated != tokens).sum()), len(calls)


def _counted(package: Any) -> list[str]:
    """Return a list to which each call of the package's functions adds a name."""
    calls: list[str] = []
    replacements = package._REPLACEMENTS
    for name, function in list(replacements.names.items()):
        replacements.names[name] = _noting(function, calls)
    return calls


def _noting(function: Any, calls: list[str]) -> Any:
    import functools

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        calls.append(function.__name__)
        return function(*args, **keywords)

    return call

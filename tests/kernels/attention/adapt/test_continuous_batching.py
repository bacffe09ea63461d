"""Continuous batching of transformers with an emitted adapter: the tokens of `generate`.

With `PYTHONPATH`, the tests run with another version of transformers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models import MODELS, imported, model_of, spec, written
from support.interpreters.own_process import interpreted

from kgen.kernels.attention.adapt.derived import Variant
from kgen.spec.load import loads

CAUSAL = "mask_mod: q_idx >= kv_idx"
WINDOW = "mask_mod: q_idx >= kv_idx and q_idx - kv_idx < 8"
SLOPES = "buffers: {s: {shape: [HQ], dtype: fp32}}"
PROMPTS, NEW = (5, 19, 3, 9), 8
"""The lengths of the prompts, and the number of tokens to generate. A batch has 16 tokens, so a
prompt is split over batches.
"""


@pytest.mark.parametrize(
    "name",
    [
        n if n in ("llama", "gemma2") else pytest.param(n, marks=pytest.mark.thorough)
        for n in ("llama", "unmasked", "qwen3", "gemma2", "gemma3", "gpt_oss")
    ],
)
def test_a_batch_has_the_tokens_of_eager(name: str, tmp_path: Path) -> None:
    written(spec(name, MODELS[name][2]), tmp_path)
    found = interpreted(generated, tmp_path, name)
    assert found["tokens"] == found["eager"]
    assert len({*map(tuple, found["tokens"])}) == len(PROMPTS)
    assert found["calls"] > 0
    # Before 5.16, transformers leaves the prefix after a batch.
    assert found["implementation"].removeprefix("paged|") == f"my_{name}"


def generated(folder: Path, name: str) -> dict[str, Any]:
    """Return the tokens of `generate_batch`, and those of `generate` with eager attention."""
    package = imported(folder, name)
    calls = []
    for key, (function, more) in package.BATCHED.items():

        def counted(*args: Any, function: Any = function, **kwargs: Any) -> Any:
            calls.append(1)
            return function(*args, **kwargs)

        package.BATCHED[key] = counted, more
    model = model_of(name).eval()
    torch.manual_seed(2)
    prompts = [torch.randint(1, 64, (n,)).tolist() for n in PROMPTS]
    eager = []
    for prompt in prompts:
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        made = model.generate(torch.tensor([prompt]), **options)
        eager.append(made[0, len(prompt) :].tolist())
    model.set_attn_implementation(f"my_{name}")
    results = batch(model, prompts)
    return {
        "tokens": results,
        "eager": eager,
        "calls": len(calls),
        "implementation": model.config._attn_implementation,
    }


def batch(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Generate tokens with continuous batching on a CPU, in any version of transformers."""
    import transformers
    from transformers.generation.continuous_batching import cache

    # On a CPU, transformers asks psutil for the free memory, or knows no size at all.
    cache.get_device_and_memory_breakdown = lambda *_: (torch.device("cpu"), 2**30, 0, 0)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    sizes = {"num_blocks": 64, "max_batch_tokens": 16}
    if hasattr(transformers, "ContinuousBatchingConfig"):
        settings = transformers.ContinuousBatchingConfig(**sizes)
        own = {"continuous_batching_config": settings}
        config = transformers.GenerationConfig(**options)
    else:
        config = transformers.GenerationConfig(**options, **sizes, use_cuda_graph=False)
        own = {}
    results = model.generate_batch(inputs=prompts, generation_config=config, **own)
    assert [result.error for result in results.values()] == [None] * len(prompts)
    found = {tuple(r.prompt_ids): list(map(int, r.generated_tokens)) for r in results.values()}
    return [found[tuple(prompt)] for prompt in prompts]


@pytest.mark.parametrize(
    ("mods", "packs"),
    [
        (CAUSAL, True),
        (WINDOW, True),
        (
            f"{SLOPES}\nscore_mod: score + s[h] * (kv_idx - q_idx)\n{WINDOW}",
            True,
        ),
        (
            f"{SLOPES}\nscore_mod: score + s[h] * kv_idx\n{CAUSAL}",
            True,
        ),
        (
            f"{SLOPES}\nscore_mod: score + s[h] * kv_idx\n{WINDOW}",
            False,
        ),
        (f"buffers: {{s: {{shape: [B], dtype: fp32}}}}\nscore_mod: score + s[b]\n{CAUSAL}", False),
        (
            f"buffers: {{s: {{shape: [SK], dtype: fp32}}}}\nscore_mod: score + s[kv_idx]\n{CAUSAL}",
            False,
        ),
        (f"score_mod: score + b\n{CAUSAL}", False),
    ],
)
def test_attention_that_packed_kernels_can_compute(mods: str, packs: bool) -> None:
    assert Variant(loads(spec("llama", mods), "own.yaml")).packs is packs


def test_without_kernels_for_it_transformers_refuses(tmp_path: Path) -> None:
    """transformers raises its own error, because the adapter registers nothing."""
    written(spec("llama", f"score_mod: score + b\n{CAUSAL}"), tmp_path)
    said = interpreted(refusal, tmp_path)
    assert re.search(r"my_llama.* is not supported", said)
    text = (tmp_path / "my_llama_transformers" / "__init__.py").read_text()
    assert "There are no kernels for continuous batching." in text


def refusal(folder: Path) -> str:
    imported(folder, "llama")
    model = model_of("llama").eval()
    model.set_attn_implementation("my_llama")
    try:
        batch(model, [[1, 2, 3]])
    except ValueError as error:
        return str(error)
    return ""


def test_another_call_is_refused(tmp_path: Path) -> None:
    written(spec("llama", CAUSAL), tmp_path)
    assert "is for `generate_batch`" in interpreted(called, tmp_path)


def called(folder: Path) -> str:
    package = imported(folder, "llama")
    model = model_of("llama")
    model.set_attn_implementation(package.PAGED)
    try:
        model(torch.tensor([[1, 2, 3]]))
    except ValueError as error:
        return str(error)
    return ""


def test_a_layer_may_gather_the_keys_itself(tmp_path: Path) -> None:
    """Layers of transformers 5.24 pass the gathered keys, and no cache."""
    written(spec("llama", CAUSAL), tmp_path)
    error, said = interpreted(gathered, tmp_path)
    assert error < 1e-5
    assert "is for `generate_batch`" in said


def gathered(folder: Path) -> tuple[float, str]:
    """Return the largest error against float64, and the error of a call without indices."""
    package = imported(folder, "llama")
    torch.manual_seed(0)
    lengths = (3, 9), (1, 6), (4, 4)  # queries and keys of three sequences
    queries, keys = (torch.tensor([0, *column]).cumsum(0) for column in zip(*lengths, strict=True))
    q = torch.randn(1, 4, int(queries[-1]), 16)
    k, v = torch.randn(2, 1, 2, int(keys[-1]), 16)
    offsets = {"cu_seq_lens_q": queries, "cu_seq_lens_k": keys}
    layer = model_of("llama").model.layers[0].self_attn
    out, _ = package.paged_attention(
        layer, q, k, v, None, scaling=0.25, read_index=[], write_index=[], **offsets
    )
    wanted = []
    for n in range(len(lengths)):
        here, there = slice(*queries[n : n + 2]), slice(*keys[n : n + 2])
        own, *others = q[0, :, here], k[0, :, there], v[0, :, there]
        key, value = (x.repeat_interleave(2, 0).double() for x in others)
        scores = own.double() @ key.mT * 0.25
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[2] - own.shape[1])
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        wanted.append((weights @ value).transpose(0, 1))
    error = float((out[0] - torch.cat(wanted)).abs().max())
    try:
        package.paged_attention(layer, q, k, v, None, scaling=0.25, **offsets)
    except ValueError as refused:
        return error, str(refused)
    return error, ""

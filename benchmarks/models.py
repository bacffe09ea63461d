"""Time steps of transformers models with an emitted adapter.

Usage: `python benchmarks/models.py [MODEL...]`.

A model has a few layers with the shapes of a published model, and random weights. The passes are
training steps, prefill, and generation with a growing and a static cache. A training step is loss,
forward and backward, without an optimizer. With a static cache transformers compiles the model. The
implementations are the adapter and those of transformers.

All implementations of a model take turns in one process, in rotating order. The script prints
medians, their ratios, and the distance of the loss and the gradients. It writes them to
`benchmarks/<device>/models.json`. `--device cpu` is a dry run of small models in Triton's
interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

BATCH, LENGTH, PROMPT, TOKENS, CALLS = 1, 8192, 2048, 32, 10
COMMON = {
    "vocab_size": 8192,
    "num_hidden_layers": 4,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "eos_token_id": None,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
MODELS: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "llama": (
        "llama3_gqa",
        "LlamaConfig",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        ("sdpa", "flex_attention", "eager"),
    ),
    "gemma2": (
        "gemma2",
        "Gemma2Config",
        {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4096,
            **MIXED,
        },
        ("flex_attention", "eager"),
    ),
    "gpt_oss": (
        "gpt_oss",
        "GptOssConfig",
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
            **MIXED,
        },
        ("flex_attention",),
    ),
}
"""By name: the spec, the class and fields of the config, and the implementations of transformers to
compare.

The configs have the shapes of Llama 3 8B, Gemma 2 2B and GPT-OSS 20B (with few experts).
"""
SMALL = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2}


def model_of(name: str, device: str) -> Any:
    """Return the model in bf16 with eager attention."""
    import torch
    import transformers

    _, config, own, _ = MODELS[name]
    sizes = {**COMMON, **own}
    if device == "cpu":
        sizes |= SMALL | ({"layer_types": own["layer_types"][:2]} if "layer_types" in own else {})
        group = own["num_attention_heads"] // own["num_key_value_heads"]
        heads = {"num_attention_heads": group, "num_key_value_heads": 1}
        sizes |= heads | {"head_dim": own.get("head_dim", 128)}
    torch.manual_seed(0)
    made = getattr(transformers, config)(**sizes)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)


def register(spec: str, folder: Path) -> None:
    """Write and import the adapter of a spec, which registers its `attn_implementation`."""
    import importlib

    from kgen.kernels.attention.adapt.transformers import adapter
    from kgen.spec.load import load_variants

    for inner, files in adapter(load_variants(ROOT / "specs" / f"{spec}.yaml")).folders.items():
        (folder / inner).mkdir(parents=True)
        for name, content in files.items():
            (folder / inner / name).write_text(content)
    sys.path.insert(0, str(folder))
    importlib.import_module(f"{spec}_transformers")


def passes(
    model: Any, sizes: tuple[int, int, int, int], device: str
) -> dict[str, Callable[[], Any]]:
    """Return the timed functions by name."""
    import torch

    batch, length, prompt, tokens = sizes
    torch.manual_seed(1)
    ids = torch.randint(1, model.config.vocab_size, (batch, length), device=device)

    def step() -> Any:
        model.zero_grad(set_to_none=True)
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss

    def prefill() -> Any:
        with torch.no_grad():
            return model(ids, use_cache=False, logits_to_keep=1).logits

    def generate(**more: Any) -> Any:
        return model.generate(
            ids[:, :prompt],
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            **more,
        )

    return {
        "training step": step,
        "prefill": prefill,
        f"generating {tokens} tokens": partial(generate, disable_compile=True),
        f"compiled: generating {tokens} tokens": partial(generate, cache_implementation="static"),
    }


def timed(run: Callable[[], Any], device: str) -> float:
    """Return the milliseconds of a call by wall clock, since a step includes Python."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - begin)


def raced(name: str, folder: Path, device: str, chosen: list[str]) -> Iterator[dict[str, Any]]:
    """Yield a row per pass and implementation."""
    import torch

    spec, _, _, others = MODELS[name]
    # torch.compile counts all models of a process as one, and stops compiling after some.
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64
    register(spec, folder)
    model = model_of(name, device)
    sizes = (BATCH, LENGTH, PROMPT, TOKENS) if device == "cuda" else (1, 70, 20, 2)
    implementations = [spec, *others]
    for what, run in passes(model, sizes, device).items():
        if not what.startswith(tuple(chosen)):
            continue
        kept: dict[str, Any] = {}
        failed: dict[str, str] = {}
        for one in implementations:
            model.set_attn_implementation(one)
            try:
                result = run()
            except Exception as error:
                failed[one] = f"{type(error).__name__}: {error}"[:300]
                continue
            grads = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
            kept[one] = torch.cat(
                [result.detach().float().flatten(), *(grads if what == "training step" else [])]
            )
            kept[one] = kept[one].cpu()
        times: dict[str, list[float]] = {one: [] for one in kept}
        calls = 1 if device == "cpu" else 4 if "generating" in what else CALLS
        for call in range(-2, calls):
            for one in sorted(times, reverse=call % 2 == 0):
                model.set_attn_implementation(one)
                took = timed(run, device)
                if call >= 0:
                    times[one].append(took)
        own = statistics.median(times[spec])
        for one in implementations:
            if one in failed:
                yield {"model": name, "pass": what, "attention": one, "error": failed[one]}
                continue
            median = statistics.median(times[one])
            apart = ((kept[one] - kept[spec]).norm() / kept[spec].norm()).item()
            yield {
                "model": name,
                "pass": what,
                "attention": "kgen" if one == spec else one,
                "milliseconds": round(median, 3),
                "ratio": round(median / own, 4),
                "apart": float(f"{apart:.1e}"),
                "error": None,
            }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", default=list(MODELS), help=f"Default: {', '.join(MODELS)}."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="Default: cuda.")
    parser.add_argument("--passes", nargs="+", help="Prefixes of pass names. Default: all.")
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "benchmarks",
        help="Folder of results. Default: benchmarks/.",
    )
    asked = parser.parse_args()
    if asked.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        from kgen.verify import interpreter

        interpreter.mend()
    from kgen.verify.toolchain import describe, versions

    facts = describe(asked.device) | {"versions": versions(("torch", "triton", "transformers"))}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.models:
            for row in raced(name, Path(folder), asked.device, asked.passes or [""]):
                rows.append(row)
                print(json.dumps(row), flush=True)
            if asked.device == "cuda":
                write(asked.output, facts, rows)


def write(output: Path, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write the rows. Rows of other models and passes are kept."""
    path = output / facts["device"].lower().replace(" ", "-") / "models.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    now = {(row["model"], row["pass"]) for row in rows}
    shape = {
        "batch": BATCH,
        "length": LENGTH,
        "prompt": PROMPT,
        "layers": COMMON["num_hidden_layers"],
    }
    kept = [row for row in before if (row["model"], row["pass"]) not in now]
    path.write_text(json.dumps({**facts, "shape": shape, "rows": kept + rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

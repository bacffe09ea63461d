"""Small random models of transformers, and adapters for their attention."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch

from kgen.kernels.attention.adapt.transformers import adapter
from kgen.spec.load import loads_variants

WINDOW = "mask_mod: q_idx >= kv_idx and q_idx - kv_idx < window"
SIZES = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": None,
}
MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", {}, "mask_mod: q_idx >= kv_idx"),
    "qwen3": ("Qwen3Config", {}, "mask_mod: kv_idx <= q_idx"),
    "phi3": ("Phi3Config", {}, "mask_mod: q_idx >= kv_idx"),
    "gpt_neox": ("GPTNeoXConfig", {"hidden_size": 64}, "mask_mod: q_idx >= kv_idx"),
    "unmasked": ("LlamaConfig", {}, "score_mod: score"),
    "gemma2": (
        "Gemma2Config",
        {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0, **MIXED},
        f"params: {{cap: 5.0, window: 8}}\nscore_mod: cap * tanh(score / cap)\n{WINDOW}",
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"query_pre_attn_scalar": 16, **MIXED},
        f"params: {{window: 8}}\n{WINDOW}",
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default"},
            **MIXED,
        },
        f"sinks: true\nparams: {{window: 8}}\n{WINDOW}",
    ),
}
"""Models by name: a config, its values in addition to SIZES, and the attention of its layers."""


def spec(name: str, mods: str) -> str:
    gqa = "" if name == "gpt_neox" else "gqa: 2\n"
    return f"kernel: attention\nname: my_{name}\ndtype: fp32\nhead_dim: 16\n{gqa}{mods}\n"


def written(text: str, folder: Path) -> None:
    for inner, files in adapter(loads_variants(text, "own.yaml")).folders.items():
        (folder / inner).mkdir()
        for name, content in files.items():
            (folder / inner / name).write_text(content)


def imported(folder: Path, name: str) -> Any:
    """Import the adapter, so that its kernels run in this process."""
    from kgen.verify import interpreter

    torch.set_num_threads(1)
    interpreter.mend()
    sys.path.insert(0, str(folder))
    return importlib.import_module(f"my_{name}_transformers")


def model_of(name: str, **more: Any) -> Any:
    import transformers

    config, own, _ = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config)(**{**SIZES, **own, **more}), attn_implementation="eager"
    ).float()
    for parameter in model.parameters():  # so large that attention affects the results
        torch.nn.init.normal_(parameter, std=0.4)
    return model

"""Tiny random models of many transformers architectures, compared with eager attention through an
adapter.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TOKENS, WINDOW = 9, 4
SPECS: Mapping[str, str] = {
    "causal": "mask_mod: q_idx >= kv_idx",
    "full": "score_mod: score",
    "window": f"mask_mod: q_idx >= kv_idx and q_idx - kv_idx < {WINDOW}",
    "both_sides": f"mask_mod: abs(q_idx - kv_idx) <= {WINDOW}",
    "learned": "buffers: {t: {shape: [HQ], dtype: fp32, grad: true}}\nscore_mod: score * t[h]",
}
"""Fields of a spec, by the name of the spec."""

DECODER = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {
    "num_hidden_layers": 2,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODER = {**DECODER, **NO_DROPOUT}
IMAGE = {**ENCODER, "image_size": 12, "patch_size": 4, "attention_dropout": 0.0}
PAIR = {
    "vocab_size": 32,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def _tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 32, (2, TOKENS))}


def _both() -> dict[str, Tensor]:
    return {**_tokens(), "decoder_input_ids": torch.randint(3, 32, (2, TOKENS - 2))}


def _padded(
    inputs: Callable[[], dict[str, Tensor]], side: slice
) -> Callable[[], dict[str, Tensor]]:
    """Return a function that makes inputs with padding in the second sequence."""

    def made() -> dict[str, Tensor]:
        mask = torch.ones(2, TOKENS, dtype=torch.long)
        mask[1, side] = 0
        return {**inputs(), "attention_mask": mask}

    return made


BEFORE, AFTER = slice(3), slice(-3, None)


def _image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 12, 12)}


def _sound() -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 200)}


def _spectrum() -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(2, 8, 2 * TOKENS),
        "decoder_input_ids": torch.randint(3, 32, (2, TOKENS)),
    }


@dataclass(frozen=True)
class Architecture:
    """A class of transformers, a config for it, and its inputs."""

    model: str
    config: Mapping[str, Any] = field(default_factory=lambda: DECODER)
    inputs: Callable[[], dict[str, Tensor]] = _tokens

    def built(self) -> Any:
        """Return a model with weights so large that attention affects the results."""
        import transformers

        kind = getattr(transformers, self.model)
        torch.manual_seed(0)
        config = kind.config_class(**self.config)
        config._attn_implementation = "eager"
        model = kind(config).float().train()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return model


ARCHITECTURES: Mapping[str, Architecture] = {
    "Llama": Architecture("LlamaForCausalLM"),
    "Llama, `is_causal=False`": Architecture("LlamaForCausalLM", {**DECODER, "is_causal": False}),
    "Llama, padded": Architecture("LlamaForCausalLM", inputs=_padded(_tokens, BEFORE)),
    "Qwen2": Architecture("Qwen2ForCausalLM"),
    "Qwen3": Architecture("Qwen3ForCausalLM"),
    "Mistral": Architecture("MistralForCausalLM", {**DECODER, "sliding_window": WINDOW}),
    "Mistral, `is_causal=False`": Architecture(
        "MistralForCausalLM", {**DECODER, "sliding_window": WINDOW, "is_causal": False}
    ),
    "Mixtral": Architecture(
        "MixtralForCausalLM", {**DECODER, "sliding_window": None, "num_local_experts": 2}
    ),
    "Phi-3": Architecture("Phi3ForCausalLM"),
    "OLMo 2": Architecture("Olmo2ForCausalLM"),
    "Granite": Architecture("GraniteForCausalLM"),
    "Cohere": Architecture("CohereForCausalLM"),
    "Gemma": Architecture("GemmaForCausalLM"),
    "Gemma 2": Architecture("Gemma2ForCausalLM", {**DECODER, **MIXED, "query_pre_attn_scalar": 16}),
    "Gemma 3": Architecture("Gemma3ForCausalLM", {**DECODER, **MIXED, "query_pre_attn_scalar": 16}),
    "GPT-OSS": Architecture(
        "GptOssForCausalLM",
        {
            **DECODER,
            **MIXED,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default"},
        },
    ),
    "Llama 4": Architecture(
        "Llama4ForCausalLM",
        {
            **DECODER,
            "intermediate_size_mlp": 32,
            "num_local_experts": 2,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention"],
        },
    ),
    "GPT-NeoX": Architecture("GPTNeoXForCausalLM"),
    "GPT-2": Architecture(
        "GPT2LMHeadModel",
        {
            "vocab_size": 32,
            "n_embd": 32,
            "n_layer": 1,
            "n_head": 2,
            "n_positions": 32,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
        },
    ),
    "OPT": Architecture(
        "OPTForCausalLM", {**DECODER, "ffn_dim": 32, "word_embed_proj_dim": 32, "dropout": 0.0}
    ),
    "Bloom": Architecture(
        "BloomForCausalLM", {"vocab_size": 32, "hidden_size": 32, "n_layer": 1, "n_head": 2}
    ),
    "GPT-J": Architecture(
        "GPTJForCausalLM",
        {
            "vocab_size": 32,
            "n_embd": 32,
            "n_layer": 1,
            "n_head": 2,
            "rotary_dim": 8,
            "n_positions": 32,
        },
    ),
    "BERT": Architecture("BertModel", ENCODER),
    "BERT, padded": Architecture("BertModel", ENCODER, _padded(_tokens, AFTER)),
    "BERT, a decoder": Architecture("BertLMHeadModel", {**ENCODER, "is_decoder": True}),
    "RoBERTa": Architecture("RobertaModel", ENCODER),
    "DistilBERT": Architecture(
        "DistilBertModel",
        {
            "vocab_size": 32,
            "dim": 32,
            "hidden_dim": 32,
            "n_layers": 1,
            "n_heads": 2,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "ModernBERT": Architecture(
        "ModernBertModel",
        {
            **DECODER,
            "local_attention": 2 * WINDOW,
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "ViT": Architecture("ViTModel", IMAGE, _image),
    "DINOv2": Architecture("Dinov2Model", IMAGE, _image),
    "CLIP, images": Architecture("CLIPVisionModel", IMAGE, _image),
    "CLIP, text": Architecture("CLIPTextModel", DECODER),
    "SigLIP, images": Architecture("SiglipVisionModel", IMAGE, _image),
    "BART": Architecture("BartForConditionalGeneration", PAIR, _both),
    "BART, padded": Architecture("BartForConditionalGeneration", PAIR, _padded(_both, AFTER)),
    "T5": Architecture(
        "T5ForConditionalGeneration",
        {
            "vocab_size": 32,
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 32,
            "num_layers": 1,
            "num_heads": 2,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 1,
        },
        _both,
    ),
    "Whisper": Architecture(
        "WhisperForConditionalGeneration",
        {**PAIR, "num_mel_bins": 8, "max_source_positions": TOKENS, "max_target_positions": 16},
        _spectrum,
    ),
    "wav2vec2": Architecture(
        "Wav2Vec2Model",
        {
            **ENCODER,
            "conv_dim": (8,),
            "conv_kernel": (10,),
            "conv_stride": (20,),
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "feat_proj_dropout": 0.0,
            "activation_dropout": 0.0,
            "layerdrop": 0.0,
            "mask_time_prob": 0.0,
            "apply_spec_augment": False,
        },
        _sound,
    ),
}
"""Architectures by their names in the table of the docs."""


def spec(name: str) -> str:
    """Return the text of a spec."""
    return f"kernel: attention\nname: table_{name}\ndtype: fp32\nhead_dim: 16\n{SPECS[name]}\n"


def outcomes(folder: Path, architecture: str) -> dict[str, str]:
    """Return `right`, `refused: ...` or the largest difference from eager, by spec."""
    from kgen.verify import interpreter

    torch.set_num_threads(1)
    interpreter.mend()
    sys.path.insert(0, str(folder))
    return {name: _outcome(name, ARCHITECTURES[architecture]) for name in SPECS}


def _outcome(name: str, architecture: Architecture) -> str:
    adapter = importlib.import_module(f"table_{name}_transformers")
    t = torch.tensor([0.5, -1.5], requires_grad=True)
    if name == "learned":
        adapter.register(t=t)
    _register_reference(t if name == "learned" else None)
    model = architecture.built()
    torch.manual_seed(1)
    inputs = architecture.inputs()
    model.set_attn_implementation("reference")
    with _counted("reference") as wanted_calls:
        wanted = _results(model, inputs, t)
    if name != "learned":
        model.set_attn_implementation("eager")
        eager = _results(model, inputs, t)
        assert _difference(eager, wanted) < 3e-5, "the reference is not eager"
    try:
        model.set_attn_implementation(f"table_{name}")
        with _counted(f"table_{name}") as calls:
            found = _results(model, inputs, t)
    except ValueError as error:
        if not str(error).startswith(f"table_{name}: "):  # the model itself raised the error
            raise
        return f"refused: {error}"
    assert len(calls) == len(wanted_calls) > 0, "other layers call the adapter"
    difference = _difference(found, wanted)
    return "right" if difference < 3e-5 else f"wrong by {difference:.1e}"


@contextmanager
def _counted(name: str) -> Iterator[list[int]]:
    """Yield a list that gets one element per call of a registered attention."""
    from transformers import AttentionInterface

    function, calls = AttentionInterface()[name], list[int]()

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(len(calls))
        return function(*args, **options)

    AttentionInterface.register(name, counted)
    yield calls
    AttentionInterface.register(name, function)


def _register_reference(t: Tensor | None) -> None:
    """Register float64 attention that uses the mask that the model makes for eager."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    def reference(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        q, k, v = (x.double() for x in (query, key, value))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if t is not None:
            scores = scores * t.double()[:, None, None]
        for bias in (position_bias, attention_mask):
            scores = scores if bias is None else scores + bias.double()
        if s_aux is not None:
            sinks = s_aux.double()[None, :, None, None].expand(*scores.shape[:3], 1)
            p = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            p = scores.softmax(-1)
        return (p @ v).transpose(1, 2).contiguous().to(query.dtype), None

    AttentionInterface.register("reference", reference)
    AttentionMaskInterface.register("reference", eager_mask)


def _results(model: Any, inputs: Mapping[str, Tensor], t: Tensor) -> dict[str, Tensor]:
    """Return the output of a model, and the gradients of its parameters and of the learned
    buffer.
    """
    model.zero_grad()
    t.grad = None
    out = model(**inputs, **({"use_cache": False} if "input_ids" in inputs else {}))[0]
    there = inputs.get("attention_mask")
    if there is not None and there.shape == out.shape[:2]:  # results of padding are arbitrary
        out = out * there[..., None]
    torch.manual_seed(2)
    (out * torch.randn_like(out)).sum().backward()
    found = {"out": out.detach()}
    found |= {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found | ({"t": t.grad.clone()} if t.grad is not None else {})


def _difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Return the largest difference, relative to the largest element of each tensor.

    Some gradients are zero up to rounding, for example of a key bias. Their scale is at least 1/100
    of the largest gradient.
    """
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    least = 1e-2 * max(float(x.abs().max()) for x in wanted.values())
    return max(
        float((found[n] - x).abs().max() / x.abs().max().clamp(min=least))
        for n, x in wanted.items()
    )

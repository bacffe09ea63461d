"""transformers models with an emitted adapter: logits, gradients and generated tokens equal those
of eager.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import MODELS, imported, model_of, spec, written
from support.interpreters.own_process import interpreted
from torch import Tensor

DOCS = Path(__file__).parents[4] / "docs" / "adapters.md"


def tokens() -> tuple[Tensor, Tensor]:
    """Return two sequences and the mask of their tokens. The second begins with padding."""
    torch.manual_seed(1)
    ids = torch.randint(1, 64, (2, 21))
    there = torch.ones_like(ids)
    there[1, :6] = 0
    return ids, there


def results(model: Any, implementation: str) -> dict[str, Tensor]:
    """Return the results of training and generation."""
    ids, there = tokens()
    model.set_attn_implementation(implementation)
    found = {}
    for name, mask in (("", None), ("padded ", there)):
        model.train().zero_grad()
        # Padding predicts nothing, so the first token after padding is no label.
        labels = ids if mask is None else ids.masked_fill((mask.cumsum(1) < 2), -100)
        out = model(ids, attention_mask=mask, labels=labels)
        out.loss.backward()
        found[f"{name}logits"] = out.logits.detach()[there.bool()]
        found |= {
            f"{name}d {n}": p.grad.clone()
            for n, p in model.named_parameters()
            if p.grad is not None
        }
    model.eval()
    whole = torch.ones_like(there)
    static = {"cache_implementation": "static"}
    for name, mask, n, more in (
        ("", there, 14, {}),
        ("static ", there, 14, static),
        ("whole ", whole, 4, {}),
    ):
        given = {
            "max_new_tokens": n,
            "do_sample": False,
            "output_scores": True,
            "return_dict_in_generate": True,
        }
        out = model.generate(ids, attention_mask=mask, **given, **more)
        found[f"{name}tokens"], found[f"{name}scores"] = out.sequences, torch.stack(out.scores)
    return found


def compared(folder: Path, name: str) -> dict[str, float]:
    """Return the difference from eager of each result, relative to its largest element.

    For tokens, 0 means equal.
    """
    imported(folder, name)
    model = model_of(name)
    ours, eager = results(model, f"my_{name}"), results(model, "eager")
    assert ours.keys() == eager.keys()
    assert eager["tokens"].shape[1] == 21 + 14
    return {
        key: float(not torch.equal(ours[key], wanted))
        if wanted.dtype == torch.long
        else float((ours[key] - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))
        for key, wanted in eager.items()
    }


@pytest.mark.parametrize("name", [n for n in MODELS if n not in ("phi3", "gpt_neox")])
def test_a_model_is_what_it_is_in_eager(name: str, tmp_path: Path) -> None:
    written(spec(name, MODELS[name][2]), tmp_path)
    found = interpreted(compared, tmp_path, name)
    assert len(found) > 30
    assert {key: error for key, error in found.items() if not error < 3e-5} == {}


MIXED_PRECISION = [
    "llama",
    *(pytest.param(n, marks=pytest.mark.thorough) for n in ("qwen3", "phi3", "gpt_neox")),
]


@pytest.mark.parametrize("name", MIXED_PRECISION)
def test_a_model_of_float32_trains_under_autocast(name: str, tmp_path: Path) -> None:
    written(spec(name, MODELS[name][2]).replace("dtype: fp32", "dtype: bf16"), tmp_path)
    found = interpreted(autocast, tmp_path, name)
    assert len(found) > 20
    assert {key: error for key, error in found.items() if not error < 3e-2} == {}


def autocast(folder: Path, name: str) -> dict[str, float]:
    """Return the differences from PyTorch's attention, relative to the norm.

    Gradients must have the dtype of their parameters.
    """
    imported(folder, name)
    model, (ids, there) = model_of(name), tokens()
    found = []
    for implementation in ("sdpa", f"my_{name}"):
        model.set_attn_implementation(implementation)
        results: dict[str, Tensor] = {}
        for case, mask in (("", None), ("padded ", there)):
            model.train().zero_grad()
            labels = ids if mask is None else ids.masked_fill((mask.cumsum(1) < 2), -100)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(ids, attention_mask=mask, labels=labels)
            out.loss.backward()
            grads = {f"{case}d {n}": p.grad.clone() for n, p in model.named_parameters()}
            assert {g.dtype for g in grads.values()} == {torch.float32}
            seen = there.bool() if mask is not None else slice(None)
            results |= {f"{case}logits": out.logits.detach().float()[seen], **grads}
        found.append(results)
    wanted, got = found
    return {key: float((got[key] - x).norm() / x.norm()) for key, x in wanted.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gpt_neox"])
def test_a_training_loop_in_mixed_precision_has_the_losses_of_eager(
    name: str, tmp_path: Path
) -> None:
    written(spec(name, MODELS[name][2]).replace("dtype: fp32", "dtype: bf16"), tmp_path)
    losses, wanted = interpreted(trained, tmp_path, name)
    assert wanted[-1] < 0.9 * wanted[0], "nothing is learned"
    assert losses == pytest.approx(wanted, rel=2e-2)


def trained(folder: Path, name: str) -> tuple[list[float], list[float]]:
    """Return the losses with the adapter and with eager, in a loop like `Trainer(bf16=True)`.

    Each step accumulates two batches, recomputes activations, clips gradients and steps AdamW.
    """
    imported(folder, name)
    found = []
    for implementation in (f"my_{name}", "eager"):
        model, (ids, there) = model_of(name), tokens()
        model.set_attn_implementation(implementation)
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(3):
            total = 0.0
            for batch, mask in ((ids, there), (ids.flip(0), there.flip(0))):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    labels = batch.masked_fill((mask.cumsum(1) < 2), -100)
                    loss = (
                        model(batch, attention_mask=mask, labels=labels, use_cache=False).loss / 2
                    )
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
        found.append(losses)
    return found[0], found[1]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_with_a_static_cache_steps_are_compiled_as_a_whole(name: str, tmp_path: Path) -> None:
    written(spec(name, MODELS[name][2]), tmp_path)
    assert interpreted(compiled, tmp_path, name) < 3e-5


def compiled(folder: Path, name: str) -> float:
    """Return the difference of generation scores from eager if torch.compile makes one graph per
    step, as on a GPU.
    """
    from transformers import CompileConfig

    imported(folder, name)
    model = model_of(name).eval()
    ids, there = tokens()
    whole = CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    whole._compile_all_devices = True
    found = []
    for implementation, more in (("eager", {}), (f"my_{name}", {"compile_config": whole})):
        model.set_attn_implementation(implementation)
        out = model.generate(
            ids,
            attention_mask=there,
            max_new_tokens=6,
            do_sample=False,
            cache_implementation="static",
            output_scores=True,
            return_dict_in_generate=True,
            **more,
        )
        found.append(torch.stack(out.scores))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return float((found[0] - found[1]).abs().max() / found[0].abs().max())


MISTAKES = {
    "queries stand where keys do": (
        "at[..., 0], at[..., 1] = q_offset, kv_offset",
        "at[..., 0], at[..., 1] = 0, 0",
    ),
    "queries stand there where nothing is padding": (
        "(q_offset, kv_offset, 0, kv_length)",
        "(0, 0, 0, kv_length)",
    ),
    "padding is there": ("at[..., 2], at[..., 3] = first, end", "at[..., 2], at[..., 3] = 0, end"),
    "all layers have a window": ('("causal_mask_function",): 1', '("causal_mask_function",): 0'),
    "no layer has a window in a cache": (
        '{"sliding_window": WINDOW}',
        '{"sliding_window": 2**30}',
    ),
}


SAMPLE = "queries stand where keys do"


@pytest.mark.parametrize(
    "mistake", [m if m == SAMPLE else pytest.param(m, marks=pytest.mark.thorough) for m in MISTAKES]
)
def test_a_wrong_adapter_is_found(mistake: str, tmp_path: Path) -> None:
    written(spec("gemma2", MODELS["gemma2"][2]), tmp_path)
    path = tmp_path / "my_gemma2_transformers" / "__init__.py"
    right, wrong = MISTAKES[mistake]
    text = path.read_text()
    assert text.count(right) == 1
    path.write_text(text.replace(right, wrong))
    found = interpreted(compared, tmp_path, "gemma2")
    assert max(found.values()) > 1e-3


PLAIN = torch.empty(1, 4099, 1, 0, dtype=torch.int32)
"""The mask that `places` makes for the first kernels if there is no padding."""
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "dropout": ("gemma2", {"dropout": 0.1}, "dropout is not supported"),
    "weights": ("gemma2", {"output_attentions": True}, "attention weights are not supported"),
    "another window": (
        "gemma2",
        {"sliding_window": 9, "attention_mask": PLAIN},
        "a window of 9, and the kernels have a window of 8",
    ),
    "a window": (
        "llama",
        {"sliding_window": 9, "attention_mask": PLAIN},
        "a window of 9, and the kernels have no window",
    ),
    "another cap": ("gemma2", {"softcap": 30.0}, "caps scores at 30.0, and the kernels at 5.0"),
    "a cap": ("llama", {"softcap": 30.0}, "caps scores at 30.0, and the kernels do not"),
    "sinks": ("llama", {"s_aux": 1}, "set `sinks: true` in the spec"),
    "no sinks": ("gpt_oss", {}, "the layer has none"),
    "a mask of pairs": (
        "llama",
        {"attention_mask": torch.zeros(1, 1, 4, 4)},
        "got a mask of pairs",
    ),
    "a bias": ("llama", {"position_bias": torch.zeros(1, 4, 4, 4)}, "passes `position_bias`"),
    "packed sequences": (
        "llama",
        {"cu_seq_lens_q": torch.arange(3)},
        "`cu_seq_lens_q` means packed",
    ),
    "packed sequences of a recurrence": (
        "llama",
        {"seq_idx": torch.arange(3)},
        "`seq_idx` means packed",
    ),
    "a cache of pages": ("llama", {"cache": object()}, "`cache`, which the kernels do not support"),
    "indices": ("llama", {"indices": torch.zeros(1), "use_cache": True}, "passes `indices`"),
    "no mask": ("llama", {}, "the mask is unknown"),
    "all keys, without a mask": (
        "llama",
        {"is_causal": False},
        "a mask of bidirectional_mask_function",
    ),
    "all keys beside a mask": (
        "llama",
        {"is_causal": False, "attention_mask": PLAIN},
        "passes `is_causal=False`, which contradicts its mask",
    ),
    "kernels that are not there": (
        "llama",
        {"attention_mask": torch.empty(1, 4100, 1, 0, dtype=torch.int32)},
        "got a mask of pairs",
    ),
    "another number of keys": (
        "llama",
        {"attention_mask": PLAIN, "query": torch.zeros(1, 4, 1, 16)},
        "the mask has another number of keys",
    ),
    "fewer queries": (
        "llama",
        {"query": torch.zeros(1, 4, 1, 16)},
        "the positions of the queries are unknown",
    ),
}


def test_what_kernels_do_not_do_is_refused(tmp_path: Path) -> None:
    for name in ("llama", "gemma2", "gpt_oss"):
        written(spec(name, MODELS[name][2]), tmp_path)
    found = interpreted(_refusals, tmp_path)
    assert {case: said for case, said in found.items() if REFUSED[case][2] not in said} == {}


def _refusals(folder: Path) -> dict[str, str]:
    found = {}
    for case, (name, arguments, _) in REFUSED.items():
        adapter, given = imported(folder, name), dict(arguments)
        query, key = given.pop("query", torch.zeros(1, 4, 4, 16)), torch.zeros(1, 2, 4, 16)
        with pytest.raises(ValueError, match=f"my_{name}: ") as error:
            adapter.attention(
                torch.nn.Module(), query, key, key, given.pop("attention_mask", None), **given
            )
        found[case] = str(error.value)
    return found


def test_masks_that_kernels_do_not_have_are_refused(tmp_path: Path) -> None:
    written(spec("llama", MODELS["llama"][2]), tmp_path)
    packed, either, between, bloom, taken = interpreted(_masks, tmp_path)
    assert "a mask of or_masks(causal_mask_function, causal_mask_function)" in either
    assert "my_llama: BloomForCausalLM computes attention itself" in bloom
    assert "a mask of causal_mask_function and packed_sequence_mask_function" in packed
    assert "register(any_mask=True)" in packed
    assert "not between" in between
    assert taken


def _masks(folder: Path) -> tuple[str, str, str, str, bool]:
    from transformers import AutoModelForCausalLM, BloomConfig
    from transformers import masking_utils as masks

    adapter = imported(folder, "llama")
    apart = masks.packed_sequence_mask_function(torch.zeros(1, 9, dtype=torch.int32))
    both = masks.and_masks(masks.causal_mask_function, apart)
    with pytest.raises(ValueError, match="packed") as packed:
        adapter.places(1, 9, 9, mask_function=both)
    with pytest.raises(ValueError, match="or_masks") as either:
        adapter.places(1, 9, 9, mask_function=masks.or_masks(*[masks.causal_mask_function] * 2))
    bloom = BloomConfig(vocab_size=8, hidden_size=32, n_layer=1, n_head=2)
    with pytest.raises(ValueError, match="Bloom") as selected:
        AutoModelForCausalLM.from_config(bloom, attn_implementation="my_llama")
    there = torch.tensor([[True, False, True, True]])
    with pytest.raises(ValueError, match="between") as between:
        adapter.places(1, 4, 4, mask_function=masks.causal_mask_function, attention_mask=there)
    adapter.register(any_mask=True)
    said = [str(error.value) for error in (packed, either, between, selected)]
    return *said, adapter.places(1, 9, 9, mask_function=both).shape == (1, adapter.MARK, 1, 0)


def test_a_mask_of_the_spec_replaces_that_of_the_model_on_demand(tmp_path: Path) -> None:
    """The model is not causal, the spec is."""
    written(spec("llama", MODELS["llama"][2]), tmp_path)
    assert interpreted(_replaced, tmp_path)


def _replaced(folder: Path) -> bool:
    adapter, module = imported(folder, "llama"), torch.nn.Module()
    adapter.register(any_mask=True)
    module.is_causal = False
    q = torch.randn(1, 2, 5, 16)
    out, _ = adapter.attention(
        module, q, q[:, :1], q[:, :1], None, cu_seq_lens_q=torch.tensor([0, 5])
    )
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, q[:, :1], q[:, :1], is_causal=True, enable_gqa=True
    )
    return torch.allclose(out, wanted.transpose(1, 2), atol=1e-5)


def test_buffers_are_given_once_or_by_a_function(tmp_path: Path) -> None:
    """An adapter with buffers registers only when it gets them.

    A function of buffers is called in every forward.
    """
    mods = (
        "buffers: {slopes: {shape: [HQ], dtype: fp32}}\n"
        "score_mod: score + slopes[h] * (kv_idx - q_idx)"
    )
    written(spec("alibi", mods), tmp_path)
    assert interpreted(_alibi, tmp_path)


def _alibi(folder: Path) -> bool:
    from transformers import AttentionInterface

    adapter = imported(folder, "alibi")
    assert "my_alibi" not in AttentionInterface()
    slopes, module = torch.tensor([0.5, 0.25]), torch.nn.Module()
    module.slopes, module.is_causal = slopes, False
    q, k, v = (torch.randn(1, heads, 5, 16) for heads in (2, 1, 1))
    distance = torch.arange(5) - torch.arange(5)[:, None]
    p = (q @ k.mT * 0.25 + slopes[:, None, None] * distance).softmax(-1)
    placed = torch.tensor([[[[7, 7, 0, 5]]]], dtype=torch.int32).expand(1, adapter.MARK, 1, 4)
    found = []
    for given in (slopes, lambda module, query, key: module.slopes):
        adapter.register(slopes=given)
        assert "my_alibi" in AttentionInterface()
        for mask in (None, placed):
            out, weights = adapter.attention(module, q, k, v, mask)
            assert weights is None
            found.append(torch.allclose(out, (p @ v).transpose(1, 2), atol=1e-5))
    return all(found)


def test_a_script_of_ten_lines_trains_and_generates(tmp_path: Path) -> None:
    """Run the script of docs/adapters.md in an empty folder."""
    script = re.search(
        r"^```python\n(.*?)^```", DOCS.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert script is not None
    (tmp_path / "train.py").write_text(script[1])
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    for command in (["-m", "kgen", "adapt", "gemma2", "--for", "transformers"], ["train.py"]):
        run = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert run.returncode == 0, run.stderr

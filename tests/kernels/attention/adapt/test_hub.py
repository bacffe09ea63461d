"""Repositories for the kernel hub: their own tests, and models that call them through flash-attn's
functions.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.interpreters.own_process import interpreted

from kgen.diagnostics import KgenError
from kgen.kernels.attention.adapt.derived import Variant
from kgen.kernels.attention.adapt.hub import Flash, adapter, flash
from kgen.spec.load import loads, loads_variants

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CAUSAL = "q_idx + SK - SQ >= kv_idx"
WINDOW = f"{CAUSAL} and q_idx + SK - SQ - kv_idx < 8"


def spec(mods: str, name: str = "own") -> str:
    return f"kernel: attention\nname: {name}\ndtype: fp32\nhead_dim: 16\ngqa: 2\n{mods}\n"


def written(text: str, folder: Path) -> None:
    made = adapter(loads_variants(text, "own.yaml"))
    files = {
        f"{inner}/{name}": content
        for inner, texts in made.folders.items()
        for name, content in texts.items()
    }
    for name, content in {**files, **made.started}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


MODS = {
    "packed": f"varlen: true\nmask_mod: {CAUSAL}",
    "learned": "buffers: {slopes: {shape: [HQ], dtype: fp32, grad: true}, gain: {shape: [], dtype: "
    "any, grad: true}}\n"
    "sinks: true\nscore_mod: score * (1 + gain) + slopes[h] * (kv_idx - q_idx)\n"
    "mask_mod: q_idx >= kv_idx and q_idx - kv_idx < 40",
    "given": "buffers: {doc: {shape: [B, SK], dtype: int32, sorted: true}, seen: {shape: [SK], "
    "dtype: bool}}\n"
    "params: {n: {type: int, runtime: true}}\n"
    "mask_mod: doc[b, q_idx] == doc[b, kv_idx] and seen[kv_idx] or kv_idx < n",
}


@pytest.mark.parametrize(
    "name", [n if n == "packed" else pytest.param(n, marks=pytest.mark.thorough) for n in MODS]
)
def test_what_a_repository_starts_with_passes(name: str, tmp_path: Path) -> None:
    written(spec(MODS[name]), tmp_path)
    root = tmp_path / "own_hub"
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root / "torch-ext")}
    test = root / "tests" / "test_own.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    test.write_text(test.read_text().replace("LENGTH = 256", "LENGTH = 64"))
    run = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stdout
    if name == "learned":  # the tests must detect an error
        path = root / "torch-ext" / "own" / "own" / "triton.py"
        right = "l_safe = tl.where(l_i == 0.0, 1.0, l_i)"
        assert right in path.read_text()
        path.write_text(path.read_text().replace(right, "l_safe = l_i * 1.01"))
        run = subprocess.run(
            command, cwd=root, env=env, capture_output=True, text=True, timeout=100
        )
        assert run.returncode == 1, run.stdout


def test_the_builder_reads_what_there_is(tmp_path: Path) -> None:
    written(spec(MODS["packed"], "own_kernel"), tmp_path)
    root = tmp_path / "own_kernel_hub"
    build = tomllib.loads((root / "build.toml").read_text())
    assert build["general"]["name"] == "own-kernel"
    assert build["torch-noarch"] == {}
    assert (
        root / "torch-ext" / build["general"]["name"].replace("-", "_") / "__init__.py"
    ).is_file()
    assert (root / "README.md").read_text().startswith("---\nlicense: apache-2.0\n")
    compile((root / "benchmarks" / "benchmark.py").read_text(), "benchmark.py", "exec")


@pytest.mark.parametrize(
    ("mods", "said"),
    [
        (f"mask_mod: {CAUSAL}", Flash(True, None, None, False)),
        ("mask_mod: kv_idx <= SK - SQ + q_idx", Flash(True, None, None, False)),
        ("", Flash(False, None, None, False)),
        (f"mask_mod: {WINDOW}", Flash(True, 8, None, False)),
        (f"score_mod: 5.0 * tanh(score / 5.0)\nmask_mod: {CAUSAL}", Flash(True, None, 5.0, False)),
        (f"sinks: true\nmask_mod: {CAUSAL}", Flash(True, None, None, True)),
        ("mask_mod: q_idx >= kv_idx", None),
        (f"mask_mod: {CAUSAL} and kv_idx % 2 == 0", None),
        (f"score_mod: score * 2\nmask_mod: {CAUSAL}", None),
        ("mask_mod: q_idx + SK - SQ - kv_idx < 8", None),
    ],
)
def test_what_flash_attn_has_words_for(mods: str, said: Flash | None) -> None:
    assert flash(Variant(loads(spec(f"varlen: true\n{mods}"), "own.yaml"))) == said


def test_a_cache_has_no_repository() -> None:
    with pytest.raises(KgenError, match="of caches"):
        adapter(loads_variants(spec("lengths: {kv: {per_batch: true}}"), "own.yaml"))


@pytest.mark.parametrize("mask", [CAUSAL, WINDOW], ids=["causal", "window"])
def test_a_model_takes_a_repository(mask: str, tmp_path: Path) -> None:
    written(spec(f"varlen: true\nmask_mod: {mask}"), tmp_path)
    window = 8 if mask == WINDOW else None
    for error in interpreted(_compared, tmp_path, window):
        assert error < 3e-5


def _compared(folder: Path, window: int | None) -> list[float]:
    """Return the relative errors of a model with flash-attn's functions: whole, padded and
    generated sequences.
    """
    import transformers
    from transformers.integrations import hub_kernels

    package = imported(folder)
    hub_kernels.is_kernels_available = lambda *_: True
    hub_kernels.get_kernel = lambda *_, **__: package
    config: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    torch.manual_seed(0)
    config = transformers.MistralConfig(**config, **heads, sliding_window=window, eos_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids, there = torch.randint(1, 64, (2, 21)), torch.ones(2, 21, dtype=torch.long)
    there[1, :6] = 0
    found = []
    for implementation in ("eager", "own/own"):
        model.set_attn_implementation(implementation, allow_all_kernels=True)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        given = {
            "max_new_tokens": 9,
            "do_sample": False,
            "output_scores": True,
            "return_dict_in_generate": True,
        }
        with torch.no_grad():
            padded = model(ids, attention_mask=there).logits[there.bool()]
            scores = torch.stack(model.generate(ids, attention_mask=there, **given).scores)
        found.append([padded, scores, *(p.grad.clone() for p in model.parameters())])
    return [
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(found[1], found[0], strict=True)
    ]


def imported(folder: Path) -> ModuleType:
    """Import the package, so that its kernels run in this process."""
    from kgen.verify import interpreter

    torch.set_num_threads(1)
    interpreter.mend()
    sys.path.insert(0, str(folder / "own_hub" / "torch-ext"))
    return importlib.import_module("own")


def test_the_card_shows_what_users_wrote_as_text() -> None:
    """A summary is one paragraph without markup.

    No line of the spec ends the block that quotes it.
    """
    summary = "<script>x</script> # [a](javascript:b) ![c](http://d/e.png) `f` **g** &lt; | ``` ---"
    text = (
        f"kernel: attention\nname: own\nsummary: '{summary}'\ndtype: bf16\nhead_dim: 64\n"
        "# ``` <b>\n"
    )
    card = adapter([loads(text, "own.yaml")]).started["own_hub/README.md"]
    said = next(line for line in card.splitlines() if "script" in line)
    plain = re.sub(r"\\([!-/:-@\[-`{-~])", "\0", said)
    assert plain.replace("\0", "") != plain
    for markup in ("<script", "</script", "](", "[a", "`", "**", "&lt;", "|", "://"):
        assert markup not in plain, said
    assert re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", said) == f"{summary}."
    fence = next(
        line for line in card.splitlines() if line.endswith("yaml") and line.startswith("`")
    )
    assert fence == "````yaml"
    assert card.splitlines().count("````") == 1

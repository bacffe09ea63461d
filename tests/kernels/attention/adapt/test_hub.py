"""Repositories for the kernel hub: their own tests, and models that call them through flash-attn's
functions.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2
import pytest
import torch
from support.interpreters.own_process import interpreted
from support.packages import hub

from kgen.diagnostics import KgenError
from kgen.kernels.attention.adapt.derived import Variant
from kgen.kernels.attention.adapt.hub import Flash, adapter, flash
from kgen.render.adapters import Adapter, adapted
from kgen.render.rendering import render_variants
from kgen.render.writer import Output, apply, compute_changes
from kgen.spec.load import load_variants, loads, loads_variants

ROOT = Path(__file__).resolve().parents[4]
CAUSAL = "q_idx + SK - SQ >= kv_idx"
WINDOW = f"{CAUSAL} and q_idx + SK - SQ - kv_idx < 8"


def spec(mods: str, name: str = "own") -> str:
    return f"kernel: attention\nname: {name}\ndtype: fp32\nhead_dim: 16\ngqa: 2\n{mods}\n"


def written(text: str, folder: Path) -> None:
    laid_out(adapter(loads_variants(text, "own.yaml")), folder)


def laid_out(made: Adapter, folder: Path) -> None:
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
def test_the_tests_of_a_repository_pass(name: str, tmp_path: Path) -> None:
    """The tests load the build with `get_kernel`."""
    written(spec(MODS[name]), tmp_path)
    root = tmp_path / "own_hub"
    hub.built(root)
    test = root / "tests" / "test_own.py"
    test.write_text(test.read_text().replace("LENGTH = 256", "LENGTH = 64"))
    run = hub.tested(root, dict(os.environ))
    assert run.returncode == 0, run.stdout
    if name == "learned":  # the tests must detect an error
        path = root / "build" / "torch-cpu" / "_kernels" / "triton.py"
        right = "l_safe = tl.where(l_i == 0.0, 1.0, l_i)"
        assert right in path.read_text()
        path.write_text(path.read_text().replace(right, "l_safe = l_i * 1.01"))
        run = hub.tested(root, dict(os.environ))
        assert run.returncode == 1, run.stdout


def test_the_builder_accepts_a_repository(tmp_path: Path) -> None:
    written(spec(MODS["packed"], "own_kernel"), tmp_path)
    root = tmp_path / "own_kernel_hub"
    build = hub.config(root)
    general = {"name": "own-kernel", "version": 1, "edition": 5, "backends": ["cuda"]}
    assert build["general"].items() >= general.items()
    assert build["general"]["license"] == "Apache-2.0"
    assert build["general"]["hub"] == {"repo-id": "OWNER/own-kernel"}
    assert build["torch-noarch"] == {}
    assert [*hub.layout_errors(root), *hub.registration_errors(root)] == []
    assert "genKernelFlakeOutputs" in (root / "flake.nix").read_text()
    compile((root / "benchmarks" / "benchmark.py").read_text(), "benchmark.py", "exec")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("edition = 5", "edition = 6"),
        ('license = "Apache-2.0"\n', ""),
        ("own", "Own"),
        ("[torch-noarch]", "[torch-no-arch]"),
    ],
)
def test_the_builder_refuses_wrong_files(old: str, new: str, tmp_path: Path) -> None:
    """The validator is the one of kernel-builder, so the test of right files can fail."""
    written(spec(MODS["packed"]), tmp_path)
    path = tmp_path / "own_hub" / "build.toml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match="Cannot parse build configuration"):
        hub.config(path.parent)


WITH_REPOSITORIES = [path.stem for path in sorted((ROOT / "specs").glob("*.yaml"))]
SAMPLE = {"varlen_causal", "block_sparse"}


@pytest.mark.parametrize(
    "name",
    [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.thorough) for n in WITH_REPOSITORIES],
)
def test_operators_are_registered_as_the_builder_requires(name: str, tmp_path: Path) -> None:
    variants = load_variants(ROOT / "specs" / f"{name}.yaml")
    try:
        made = adapted(variants, ["hub"])
    except KgenError:
        return
    laid_out(made, tmp_path)
    root = tmp_path / f"{name}_hub"
    assert [*hub.layout_errors(root), *hub.registration_errors(root)] == []


def test_a_check_of_registrations_finds_those_of_plain_files(tmp_path: Path) -> None:
    written(spec(MODS["packed"]), tmp_path)
    package = tmp_path / "own_hub" / "torch-ext" / "own"
    plain = render_variants(loads_variants(spec(MODS["packed"]), "own.yaml"))["own"]["triton.py"]
    (package / "triton.py").write_text(plain)
    assert len([*hub.registration_errors(tmp_path / "own_hub")]) == 1


def test_two_builds_have_operators_of_their_own(tmp_path: Path) -> None:
    """Both dtypes of both builds are in one process, each in the namespace of its build."""
    text = (
        "kernel: attention\nname: own\ndtype: [bf16, fp32]\nhead_dim: 16\nmask_mod: q_idx >= kv_idx"
    )
    ids = []
    for revision in ("first", "second"):
        written(text, tmp_path / revision)
        ids.append(hub.built(tmp_path / revision / "own_hub", revision))
    names = {"own", "own_lse", "own_backward"}
    expected = {
        f"{one}::{name}_{dtype}" for one in ids for name in names for dtype in ("bf16", "fp32")
    }
    assert interpreted(_operators, tmp_path) == expected


def _operators(folder: Path) -> set[str]:
    """Load both builds, and return the operators that they add."""
    import kernels

    before = set(torch._C._dispatch_get_all_op_names())
    for revision in ("first", "second"):
        kernel = kernels.get_local_kernel(folder / revision / "own_hub" / "build")
        q = torch.randn(1, 1, 8, 16)
        assert torch.allclose(kernel.own(q[:, :, :1], q[:, :, :1], q[:, :, :1]), q[:, :, :1])
    return set(torch._C._dispatch_get_all_op_names()) - before


def test_a_layer_replaces_another_one(tmp_path: Path) -> None:
    text = "kernel: attention\nname: own\ndtype: fp32\nhead_dim: 16\nmask_mod: q_idx >= kv_idx"
    written(text, tmp_path)
    hub.built(tmp_path / "own_hub")
    assert interpreted(_layer, tmp_path / "own_hub" / "build") < 1e-5


def _layer(build: Path) -> float:
    """Replace a module with `kernels.kernelize`, and return the largest error of a call."""
    import kernels

    class Plain(torch.nn.Module):
        def forward(
            self, q: Any, k: Any, v: Any, *, scale: Any = None, return_lse: Any = False
        ) -> Any:
            raise AssertionError("the layer was not replaced")

    repository = kernels.LocalLayerRepository(build, layer_name="Own")
    model = torch.nn.Sequential(kernels.use_kernel_forward_from_hub("Own")(Plain)())
    with kernels.use_kernel_mapping({"Own": {"cpu": repository}}):
        mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
        model = kernels.kernelize(model, mode=mode, device="cpu", use_fallback=False)
    q, k, v = torch.randn(3, 2, 2, 8, 16)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return float((model[0](q, k, v) - exact).abs().max())


def test_a_folder_that_the_builder_refuses_is_deleted(tmp_path: Path) -> None:
    """kgen once wrote the kernels into `torch-ext/own/own`."""
    (path := tmp_path / "own.yaml").write_text(spec(MODS["packed"]))
    old = "out/own_hub/torch-ext/own/own"
    folder = render_variants(load_variants(path))["own"]
    outputs = [Output(path, old.removeprefix("out/"), folder)]
    apply(compute_changes(outputs, tmp_path / "out", others=False))
    assert (tmp_path / old / "triton.py").exists()
    made = adapted(load_variants(path), ["hub"])
    outputs = [Output(path, name, files) for name, files in made.folders.items()]
    apply(compute_changes(outputs, tmp_path / "out", made.started, others=False))
    assert not (tmp_path / old).exists()
    assert [*hub.layout_errors(tmp_path / "out/own_hub")] == []


def test_the_hub_refuses_a_short_name() -> None:
    text = spec(MODS["packed"]).replace("name: own", "name: o")
    with pytest.raises(KgenError, match="no repositories with the name `o`") as raised:
        adapter(loads_variants(text, "own.yaml"))
    (problem,) = raised.value.diagnostics
    assert (problem.file, problem.line, problem.column) == ("own.yaml", 2, 7)


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


def filled(card: str) -> str:
    """Fill the template of a card as kernel-builder does, whose engine has jinja's syntax."""
    template = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True).from_string(card)
    return template.render(
        repo_id="me/own", version=1, license="apache-2.0", has_benchmark=True, functions=["own"]
    )


def test_the_card_shows_text_of_users_as_text() -> None:
    """A summary is one paragraph without markup.

    No line of the spec ends the block that quotes it, and none is a tag of kernel-builder.
    """
    summary = (
        "<script>x</script> # [a](javascript:b) ![c](http://d/e.png) `f` **g** &lt; | ``` --- "
        "{{ 1 // 0 }}{% endraw %}{# x #}{{{%"
    )
    text = (
        f"kernel: attention\nname: own\nsummary: '{summary}'\ndtype: bf16\nhead_dim: 64\n"
        "# ``` <b> {% raw %} {{ repo_id }}\n"
    )
    card = filled(adapter([loads(text, "own.yaml")]).started["own_hub/CARD.md"])
    assert card.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n---\n\n# me/own\n\n")
    assert 'get_kernel("me/own", version=1, trust_remote_code=True)' in card
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
    assert "# ``` <b> {% raw %} {{ repo_id }}" in card.splitlines()

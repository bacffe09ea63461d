"""The attention of FlashAttention's arguments that specs compute, and the packages of several
specs.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kgen.cli import app
from kgen.diagnostics import Diagnostic, KgenError
from kgen.kernels.attention.adapt.covered import Window, covered
from kgen.kernels.attention.adapt.flash import flash_attn_package, torch_package
from kgen.render.project import adapt_all
from kgen.spec.load import Loaded, loads, loads_variants

END = "q_idx + SK - SQ"
CACHE = "passes: [forward, decode]\nlengths: {q: any, kv: {per_batch: true}}\n"


def spec(mods: str = "", name: str = "own") -> str:
    return f"kernel: attention\nname: {name}\ndtype: bf16\nhead_dim: 64\n{mods}\n"


def variants(mods: str, name: str = "own") -> list[Loaded]:
    return loads_variants(spec(mods, name), f"{name}.yaml")


WINDOWS: dict[str, Window] = {
    "": Window(None, None, True),
    "mask_mod: q_idx >= kv_idx": Window(None, 0, False),
    "mask_mod: not kv_idx > q_idx": Window(None, 0, False),
    "align: end\nmask_mod: q_idx >= kv_idx": Window(None, 0, True),
    f"mask_mod: {END} >= kv_idx": Window(None, 0, True),
    "mask_mod: kv_idx - SK <= q_idx - SQ": Window(None, 0, True),
    "params: {n: 8}\nmask_mod: q_idx >= kv_idx and q_idx - kv_idx < n": Window(7, 0, False),
    "mask_mod: kv_idx > q_idx - 8": Window(7, None, False),
    "mask_mod: abs(q_idx - kv_idx) <= 3": Window(3, 3, False),
    f"mask_mod: {END} - kv_idx < 8 and kv_idx <= {END} + 2": Window(7, 2, True),
    "score_mod: score\nmask_mod: q_idx >= kv_idx": Window(None, 0, False),
    f"{CACHE}mask_mod: q_idx >= kv_idx": Window(None, 0, True),
    "passes: [forward, decode]\npaged_kv: {page_size: 64}": Window(None, None, True),
    f"varlen: true\nmask_mod: {END} >= kv_idx": Window(None, 0, True),
}


@pytest.mark.parametrize("mods", WINDOWS)
def test_equivalent_masks_are_the_same_window(mods: str) -> None:
    found = covered(loads(spec(mods), "own.yaml"), "callers", everything=True)
    assert found.window == WINDOWS[mods]
    assert found.softcap is None


def test_a_cap_is_an_argument() -> None:
    loaded = loads(spec("score_mod: 5.0 * tanh(score / 5.0)"), "own.yaml")
    assert covered(loaded, "callers", everything=True).softcap == 5.0
    assert "softcap=5.0" in covered(loaded, "callers", everything=True).row(".own.triton")


SLOPES = "buffers: {s: {shape: [HQ], dtype: fp32}}\n"
ALIBI: dict[str, Window] = {
    f"{SLOPES}score_mod: score + s[h] * (kv_idx - q_idx)\nmask_mod: q_idx >= kv_idx": Window(
        None, 0, False
    ),
    f"{SLOPES}score_mod: score - s[h] * abs(kv_idx - q_idx)": Window(None, None, False),
    f"{SLOPES}score_mod: score - abs(kv_idx - ({END})) * s[h]": Window(None, None, True),
}


@pytest.mark.parametrize("mods", ALIBI)
def test_slopes_are_an_argument(mods: str) -> None:
    found = covered(loads(spec(mods), "own.yaml"), "callers", everything=True)
    assert (found.window, found.slopes) == (ALIBI[mods], "s")
    assert 'slopes="s", slope_axes=1' in found.row(".own.triton")
    assert any("pass no buffers" in d.message for d in refused(mods, everything=False))


OTHERS: dict[str, tuple[str, int, int]] = {
    "mask_mod: q_idx > kv_idx": ("this mask is another", 5, 11),
    "mask_mod: q_idx >= kv_idx or kv_idx < 4": ("this mask is another", 5, 11),
    "mask_mod: q_idx >= kv_idx and h < 3": ("this mask is another", 5, 11),
    f"mask_mod: q_idx >= kv_idx and {END} - kv_idx < 8": ("this mask is another", 5, 11),
    "mask_mod: q_idx - kv_idx < 8 and kv_idx % 2 == 0": ("this mask is another", 5, 11),
    f"{CACHE}mask_mod: {END} >= kv_idx": ("this mask is another", 7, 11),
    "score_mod: score * 2.0": ("have no `score_mod`", 5, 12),
    "score_mod: 5.0 * tanh(score / 4.0)": ("except `cap * tanh(score / cap)`", 5, 12),
    "sinks: true": ("have no attention sinks", 5, 8),
    "block_mask: always\nmask_mod: q_idx >= kv_idx": ("pass no block mask", 5, 13),
    "backward_in_parts: true": ("compute gradients in one call", 5, 20),
    "passes: [decode]": ("need the pass `forward`", 5, 1),
    "buffers: {n: {shape: [B], dtype: int32}}\nmask_mod: kv_idx < n[b]": (
        "pass no buffers",
        5,
        1,
    ),
    f"{SLOPES}score_mod: score + s[h] * (kv_idx - q_idx)": ("have no `score_mod`", 6, 12),
    f"{SLOPES}score_mod: score - s[h] * abs({END} - kv_idx)\nmask_mod: q_idx >= kv_idx": (
        "have no `score_mod`",
        6,
        12,
    ),
    "params: {n: {type: int, runtime: true}}\nmask_mod: q_idx - kv_idx < n": (
        "pass no run-time parameters",
        5,
        1,
    ),
}


def refused(mods: str, *, everything: bool) -> tuple[Diagnostic, ...]:
    package = flash_attn_package if everything else torch_package
    with pytest.raises(KgenError) as caught:
        package([variants(mods)], "own")
    return tuple(caught.value.diagnostics)


@pytest.mark.parametrize("mods", OTHERS)
def test_another_attention_is_an_error_at_its_place(mods: str) -> None:
    words, line, column = OTHERS[mods]
    found = refused(mods, everything=True)
    assert any(words in d.message and (d.line, d.column) == (line, column) for d in found)
    assert all(d.hint and d.file == "own.yaml" and "`own`" in d.message for d in found)


OF_PYTORCH: dict[str, tuple[str, int, int]] = {
    "score_mod: 5.0 * tanh(score / 5.0)": ("have no `score_mod`", 5, 12),
    CACHE: ("have no caches", 6, 1),
    "passes: [forward, decode]\npaged_kv: {page_size: 64}": ("have no caches", 6, 1),
}


@pytest.mark.parametrize("mods", OF_PYTORCH)
def test_pytorch_has_neither_caps_nor_caches(mods: str) -> None:
    words, line, column = OF_PYTORCH[mods]
    (found,) = refused(mods, everything=False)
    assert words in found.message
    assert (found.line, found.column) == (line, column)


def test_pytorch_has_one_head_dim_of_16_bits() -> None:
    text = spec().replace("bf16", "[bf16, fp32]").replace("64", "{qk: 64, v: 32}")
    with pytest.raises(KgenError) as caught:
        torch_package([loads_variants(text, "own.yaml")], "own")
    assert [(d.line, d.column) for d in caught.value.diagnostics] == [(4, 1), (3, 1)]
    assert flash_attn_package([loads_variants(text, "own.yaml")], "own").folders


def test_all_mistakes_of_all_specs_are_listed() -> None:
    both = [variants("sinks: true\nscore_mod: 2 * score"), variants("sinks: true", "other")]
    with pytest.raises(KgenError) as caught:
        torch_package(both, "own")
    assert [(d.file, d.line) for d in caught.value.diagnostics] == [
        ("other.yaml", 5),
        ("own.yaml", 6),
        ("own.yaml", 5),
    ]


@pytest.mark.parametrize("name", ["register", "covering", "operators"])
def test_names_of_the_package_are_refused(name: str) -> None:
    with pytest.raises(KgenError, match="the package already has this name") as caught:
        torch_package([variants("", name)], "own")
    assert [(d.line, d.column) for d in caught.value.diagnostics] == [(2, 7)]
    twice = [variants("mask_mod: q_idx >= kv_idx", "one"), variants("", "one")]
    with pytest.raises(KgenError, match="already has this name"):
        torch_package(twice, "own")


def table(package: str) -> list[str]:
    """Return the names of the kernels in the table of a package, in order."""
    calls = (n for n in ast.walk(ast.parse(package)) if isinstance(n, ast.Call))
    rows = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Kernels"]
    return [ast.literal_eval(row.keywords[0].value) for row in rows]


def test_kernels_with_promises_come_first() -> None:
    """The order of the specs on the command line makes no difference."""
    specs = [
        variants("", "c"),
        variants("lengths: {q: {multiple_of: 128}}", "d"),
        variants("", "a"),
    ]
    made = torch_package(specs, "own").folders["own_torch"]["__init__.py"]
    assert table(made) == ["d", "a", "c"]
    assert "multiples=(128, 1)" in made
    assert torch_package(specs[::-1], "own").folders["own_torch"]["__init__.py"] == made


def test_each_variant_has_a_row() -> None:
    text = spec().replace("bf16", "[bf16, fp16]").replace("64", "[64, 128]")
    made = torch_package([loads_variants(text, "own.yaml")], "own").folders
    assert table(made["own_torch"]["__init__.py"]) == ["own"] * 4
    for folder in ("bf16_d64", "fp16_d128"):
        assert f'module=".own.{folder}.triton"' in made["own_torch"]["__init__.py"]
        assert "triton.py" in made[f"own_torch/own/{folder}"]


class Project:
    """A folder with two specs."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.capsys = root, capsys
        (root / "specs").mkdir()
        for name, mods in (("one", "mask_mod: q_idx >= kv_idx"), ("two", "varlen: true")):
            (root / f"specs/{name}.yaml").write_text(spec(mods, name))

    def kgen(self, *arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as caught:
            app(list(arguments), prog_name="kgen")
        out, err = self.capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, err + out


@pytest.fixture
def project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Project:
    monkeypatch.chdir(tmp_path)
    return Project(tmp_path, capsys)


def test_several_specs_have_one_package(project: Project) -> None:
    code, said = project.kgen("adapt", "--for", "torch", "--no-prove", "one", "two")
    assert code == 0
    assert "attention_torch has kernels for PyTorch's flash operators:\n  one: causal\n" in said
    assert "  two: full, packed\n" in said
    made = {path.name for path in (project.root / "adapters").iterdir()}
    assert made == {"attention_torch"}
    for arguments in (("two", "one"), ()):
        code, said = project.kgen("adapt", "--for", "torch", "--check", *arguments)
        assert (code, "0 differ, 0 edited" in said) == (0, True), said
    path = project.root / "adapters/attention_torch/two/triton.py"
    path.write_text(path.read_text() + "# mine\n")
    code, said = project.kgen("adapt", "--for", "torch", "--check")
    assert (code, "0 differ, 1 edited" in said) == (1, True), said


def test_a_package_has_the_name_of_its_spec_or_another(project: Project) -> None:
    assert project.kgen("adapt", "one", "--for", "torch", "--no-prove")[0] == 0
    assert project.kgen("adapt", "one", "--for", "torch", "--name", "mine", "--no-prove")[0] == 0
    made = {path.name for path in (project.root / "adapters").iterdir()}
    assert made == {"one_torch", "mine_torch"}
    text = (project.root / "adapters/mine_torch/__init__.py").read_text()
    assert 'name="mine"' in text
    assert "import mine_torch" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("one", "--for", "hub", "--name", "x"), "`--name` names packages that may have"),
        (("one", "--for", "torch", "--name", "a-b"), "`--name` must be a name of Python, got"),
        (("one", "two", "rms_norm", "--for", "torch"), "cannot have kernels of `rms_norm`"),
        (("rms_norm", "--for", "torch"), "`kernel: norm` has no adapter for torch"),
    ],
)
def test_wrong_names_and_families_are_usage_errors(
    arguments: tuple[str, ...], said: str, project: Project
) -> None:
    code, found = project.kgen("adapt", *arguments, "--no-prove")
    assert code == 2
    assert said in found
    assert "hint" in found
    assert not (project.root / "adapters").exists()


def test_specs_list_them(project: Project) -> None:
    path = project.root / "specs/one.yaml"
    path.write_text(path.read_text() + "adapters: [torch, flash_attn]\n")
    assert project.kgen("render", "--no-prove")[0] == 0
    for kind in ("torch", "flash_attn"):
        (made,) = adapt_all([path], [kind])
        for output in made.outputs:
            for name, text in output.files.items():
                assert (project.root / "generated" / output.name / name).read_text() == text
    assert project.kgen("render", "--check")[0] == 0
    path.write_text(path.read_text() + "sinks: true\n")
    code, said = project.kgen("render", "--no-prove")
    assert code == 2
    for place, callers in (("6:12", "PyTorch's flash operators"), ("6:19", "FlashAttention's")):
        assert f"`one`: {callers}" in said
        assert f"specs/one.yaml:{place}" in said

"""`__init__.py` of an emitted folder: the file that a call selects, with all of its arguments."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kgen.diagnostics import KgenError
from kgen.family import known_targets
from kgen.render.rendering import render_spec
from kgen.spec.load import load, loads
from kgen.targets import asked_targets, callable_files, sources
from kgen.verify.toolchain import import_file

ROOT = Path(__file__).resolve().parents[2]
STOCK = sorted((ROOT / "specs").glob("*.yaml"))
CHUNKS = "kernel: chunk_output\nname: sample\ndtype: bf16\nhead_dim: 64\n"
NORM = (
    "kernel: norm\nname: sample\nnorm: rms\nwidth: any\ndtype: bf16\n"
    "targets: {triton: {}, cuda: {}}\n"
)
HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "sample"
    for name in [name for name in sys.modules if name.split(".")[0] == "sample"]:
        del sys.modules[name]


def package(folder: Path, text: str) -> ModuleType:
    """Write the package of a spec. Its files only return their own name."""
    folder.mkdir()
    for name, source in render_spec(loads(text, "sample.yaml")).items():
        if name != "__init__.py":
            stem = Path(name).stem
            source = f"def sample(*args, **kwargs):\n    return {stem!r}, args, kwargs\n"
        (folder / name).write_text(source)
    importlib.invalidate_caches()
    return importlib.import_module("sample")


def chosen(
    module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int] | None,
    gradients: bool = False,
    missing: bool = False,
) -> str:
    """Return the file that is called for tensors on a device of that compute capability (None: the
    CPU).
    """
    for name in [name for name in vars(module) if name.startswith("_runs_")]:
        vars(module)[name].cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for file in module._THERE:
        monkeypatch.setitem(module._THERE, file, not missing)
    device = torch.device("cuda" if capability else "cpu")
    x = SimpleNamespace(device=device, requires_grad=gradients)
    stem, args, _ = module.sample(x, x, x, x, x)
    assert args == (x, x, x, x, x)
    return str(stem)


def test_the_fastest_file_that_can_run(folder, monkeypatch):
    module = package(folder, CHUNKS + "decay: g[i]\ntargets: {triton: {}, cute: {}}\n")
    assert chosen(module, monkeypatch, HOPPER) == "cute_sm90"
    assert chosen(module, monkeypatch, HOPPER, gradients=True) == "triton"
    assert chosen(module, monkeypatch, HOPPER, missing=True) == "triton"
    assert chosen(module, monkeypatch, BLACKWELL) == "triton"
    assert chosen(module, monkeypatch, None) == "triton"
    with torch.no_grad():
        assert chosen(module, monkeypatch, HOPPER, gradients=True) == "cute_sm90"


def test_a_file_for_each_architecture_and_no_other(folder, monkeypatch):
    module = package(folder, CHUNKS + "decay: g[i]\npasses: [forward]\ntargets: {cute: {}}\n")
    assert chosen(module, monkeypatch, HOPPER, gradients=True) == "cute_sm90"
    assert chosen(module, monkeypatch, BLACKWELL) == "cute_sm100"
    with pytest.raises(ValueError, match="sample: no file of this folder runs on cuda"):
        chosen(module, monkeypatch, AMPERE)


@pytest.mark.parametrize(("fastest", "called"), [(2, "cuda"), (0, "triton")])
def test_ranks_decide(folder, monkeypatch, fastest, called):
    """CUDA runs on its devices if its rank is higher. Otherwise Triton runs without a choice."""
    from kgen.kernels.norm.targets.cuda import sources as norm

    plain = norm.sources

    def ranked(loaded):
        return [
            s if s.rank is None else type(s)(**{**vars(s), "rank": fastest}) for s in plain(loaded)
        ]

    monkeypatch.setattr(norm, "sources", ranked)
    module = package(folder, NORM)
    if called == "triton":
        assert module.sample(1, 2) == ("triton", (1, 2), {})
        return
    x = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: AMPERE)
    for installed, want in ((True, "cuda"), (False, "triton")):
        module._runs_cuda.cache_clear()
        monkeypatch.setitem(module._THERE, "cuda", installed)
        assert module.sample(x, x)[0] == want


def test_files_are_imported_with_the_folder_where_they_can_be(folder, monkeypatch):
    """Exported programs name the operators that the files register, so importing the folder imports
    the files.

    A file that cannot be imported causes a warning at the import statement of the caller.
    """
    monkeypatch.setitem(sys.modules, "cuda.core", ModuleType("cuda.core"))
    module = package(folder, NORM)
    assert module._THERE == {"cuda": True}
    assert {"sample.cuda", "sample.triton"} <= {*sys.modules}
    for name in [name for name in sys.modules if name.split(".")[0] == "sample"]:
        del sys.modules[name]
    (folder / "cuda.py").write_text("raise ImportError('cannot import name `Program`')\n")
    (folder / "triton.py").write_text("import a_module_that_is_not_there\n")
    with pytest.warns(
        RuntimeWarning,
        match=r"sample: cuda.py is not used because it cannot be imported: .*Program",
    ) as caught:
        exec(compile("import sample", "caller.py", "exec"), {})
    assert [warning.filename for warning in caught] == ["caller.py"]
    module = sys.modules["sample"]
    assert module._THERE == {"cuda": False}
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        module.sample(SimpleNamespace(device=torch.device("cpu")), None)


def test_keywords_reach_the_file(folder):
    module = package(
        folder, CHUNKS + "decay: g[i]\nvarlen: true\ntargets: {triton: {}, cute: {}}\n"
    )
    x = torch.zeros(1)
    _, args, kwargs = module.sample(x, x, x, x, x, cu_seqlens=x, scale=2.0)
    assert len(args) == 5
    assert kwargs == {"cu_seqlens": x, "chunk_indices": None, "scale": 2.0}


def test_compiled_whole_and_differentiable(folder):
    """The file is selected during tracing, without a graph break."""
    spec = load(ROOT / "specs/gated_delta_output.yaml")
    for name, text in render_spec(spec).items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    module = import_file(folder / "__init__.py", "sample")
    shapes = [(1, 64, 16, 128), (1, 64, 16, 128), (1, 64, 32, 128), (1, 1, 32, 128, 128)]
    tensors = [
        torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for shape in shapes
    ]
    tensors.append(torch.empty(1, 64, 32, device="meta", requires_grad=True))
    o = torch.compile(module.gated_delta_output, fullgraph=True, backend="eager")(*tensors)
    assert o.shape == (1, 64, 32, 128)
    assert o.requires_grad


@pytest.mark.parametrize("path", STOCK, ids=lambda path: path.stem)
def test_every_folder_offers_its_function(path):
    """The function comes from the only file, or from the fastest of several."""
    loaded = load(path)
    files = callable_files(s for target in asked_targets(loaded) for s in sources(loaded, target))
    assert files, "no file has the function"
    assert len({file.rank for file in files}) == len(files), "two files of one rank"
    assert set(asked_targets(loaded)) <= set(known_targets())
    name = loaded.spec.name
    module = import_file(ROOT / "generated" / name / "__init__.py", f"kgen_test_package_{name}")
    function = getattr(module, name)
    assert (function.__module__ == module.__name__) == (len(files) > 1)
    offered = {name, *files[0].offers} if len(files) == 1 else {name}
    assert offered <= vars(module).keys()
    if len(files) == 1:
        assert set(module.__all__) == offered


HOPPER_SAYS = "hopper.py cannot be imported"


def test_kernels_for_hopper_are_found_beside_the_file_alone(tmp_path, monkeypatch):
    """`triton.py` imports `hopper.py` relatively, never by its bare name."""
    folder = tmp_path / "causal"
    folder.mkdir()
    for file in ("__init__.py", "_launch.py", "triton.py", "hopper.py"):
        (folder / file).write_bytes((ROOT / "generated" / "causal" / file).read_bytes())
    beside = import_file(folder / "triton.py", "kgen_test_beside")
    monkeypatch.setattr(beside, "_arch", lambda device: 90)
    assert beside._portable_because(torch.device("cuda")) == ""
    assert beside._hopper().__name__ == "kgen_test_beside.hopper"
    assert beside._hopper()._launch is beside._launch
    # Without `hopper.py`, the file warns once and runs its own kernels.
    (tmp_path / "hopper.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)
    (folder / "hopper.py").unlink()
    alone = import_file(folder / "triton.py", "kgen_test_alone")
    monkeypatch.setattr(alone, "_arch", lambda device: 90)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for number in range(2):
            assert HOPPER_SAYS in alone._portable_because(torch.device("cuda", number))
    (said,) = {str(warning.message) for warning in caught}
    assert said.startswith(f"causal: using portable kernels. {HOPPER_SAYS}: ")
    # Outside of a package, the error names the missing files.
    spec = importlib.util.spec_from_file_location("kgen_test_outside", folder / "triton.py")
    outside = importlib.util.module_from_spec(spec)
    with pytest.raises(
        ImportError, match=r"causal: this file cannot run alone\. Import its folder"
    ):
        spec.loader.exec_module(outside)


def test_one_file_has_all_kernels(tmp_path):
    """`--single` writes the content of a folder into one file that needs no other."""
    (text,) = render_spec(load(ROOT / "specs/causal.yaml"), single=True).values()
    path = tmp_path / "causal.py"
    path.write_text(text)
    whole = vars(import_file(path, "kgen_test_whole"))
    folder = import_file(ROOT / "generated/causal/triton.py", "kgen_test_folder")
    kernels = {n for m in (folder, folder._hopper()) for n in vars(m) if n.endswith("_kernel")}
    assert kernels == {n for n in whole if n.endswith("_kernel")}
    for name in kernels:
        own = folder if hasattr(folder, name) else folder._hopper()
        one, other = (getattr(k, "fn", k).__code__ for k in (whole[name], vars(own)[name]))
        assert one.co_code == other.co_code
    assert "from ." not in text


def test_packages_have_lines_of_at_most_120_columns() -> None:
    lines = {
        (p.parent.name, line)
        for p in ROOT.glob("generated/*/__init__.py")
        for line in p.read_text().splitlines()
    }
    assert not [one for one in lines if len(one[1]) > 120]


LIMITS = {"_launch.py": 250, "triton.py": 700}


def test_launchers_are_short_and_the_same_in_every_folder() -> None:
    launchers = sorted((ROOT / "generated").glob("*/_launch.py"))
    assert [path.parent for path in launchers] == [
        p.parent for p in sorted((ROOT / "generated").glob("*/triton.py"))
    ]
    assert len({path.read_bytes() for path in launchers}) == 1
    for file, limit in LIMITS.items():
        assert (
            len((ROOT / "generated" / "causal_alibi" / file).read_text().splitlines()) <= limit
        ), file
    assert max(map(len, launchers[0].read_text().splitlines())) <= 120


CALLS = {
    "causal_alibi": "causal_alibi(x, x, x, slopes=torch.ones(1))",
    "decode_gqa": (
        "decode_gqa(x[:, :, :1].expand(1, 4, 1, 128), x, x, kv_lens=torch.tensor([16], "
        "dtype=torch.int32))"
    ),
    "rms_norm": "rms_norm(x, torch.ones(128, dtype=x.dtype))",
}


@pytest.mark.parametrize("name", CALLS)
def test_one_file_runs_alone(name: str, tmp_path: Path) -> None:
    """The file imports only Python, torch and triton, from a folder without other files."""
    (text,) = render_spec(load(ROOT / f"specs/{name}.yaml"), single=True).values()
    (tmp_path / f"{name}.py").write_text(text)
    nodes = [*ast.walk(ast.parse(text))]
    assert not [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level]
    roots = {
        alias.name.partition(".")[0]
        for n in nodes
        if isinstance(n, ast.Import)
        for alias in n.names
    }
    roots |= {(n.module or "").partition(".")[0] for n in nodes if isinstance(n, ast.ImportFrom)}
    assert roots <= {*sys.stdlib_module_names, "torch", "triton"}
    script = [
        "import torch",
        f"from {name} import {name}",
        "x = torch.randn(1, 1, 16, 128, dtype=torch.bfloat16)",
        f"assert {CALLS[name]}.isfinite().all()",
    ]
    env = {"PATH": "/usr/bin:/bin", "TRITON_INTERPRET": "1", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", "\n".join(script)]
    run = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_where_no_file_does_without_others():
    with pytest.raises(KgenError) as caught:
        render_spec(load(ROOT / "specs/rms_norm.yaml"), ["cuda"], single=True)
    assert caught.value.diagnostics[0].code == "no-single-file"


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("generated/*/cuda.py")), ids=lambda path: path.parent.name
)
def test_cuda_files_import_without_a_gpu(path: Path) -> None:
    """Import registers the operators, so a wrong argument of the registration fails here."""
    assert import_file(path, f"imported_{path.parent.name}")


@pytest.mark.parametrize(
    "file", ["causal/triton.py", "causal/cuda.py", "gated_delta_output/cute_sm90.py"]
)
def test_a_file_that_runs_as_a_script_names_what_it_lacks(file: str) -> None:
    """Before it imports packages, of which one may have the name of a file of its folder."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "generated" / file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "this file cannot run alone. Import its folder" in done.stderr.splitlines()[-1]


LAUNCHED = (
    "causal/triton.py",
    "causal/cuda.py",
    "gated_delta_output/cute_sm90.py",
    "gated_delta_output/cute_sm100.py",
    "gated_delta_output/triton.py",
    "gated_delta_rule/triton.py",
    "rms_norm/triton.py",
    "rms_norm/cuda.py",
)
REMEDY = ": _launch.py is missing or of another version. Copy or render all files"


@pytest.mark.parametrize("file", LAUNCHED)
def test_a_copy_without_its_launcher_names_the_missing_file(file: str, tmp_path: Path) -> None:
    source = ROOT / "generated" / file
    shutil.copy(source, tmp_path)
    with pytest.raises(ImportError) as caught:
        import_file(tmp_path / source.name, f"kgen_test_incomplete_{source.stem}")
    assert type(caught.value) is ImportError
    assert str(caught.value).endswith(REMEDY)


@pytest.mark.parametrize("file", LAUNCHED)
def test_a_launcher_of_another_version_is_named(file: str, tmp_path: Path) -> None:
    """A later kgen may rename a function of `_launch.py`. The cause names the function."""
    source = ROOT / "generated" / file
    shutil.copy(source, tmp_path)
    launcher = source.with_name("_launch.py").read_text()
    assert launcher.count("def _dense(") == 1
    (tmp_path / "_launch.py").write_text(launcher.replace("def _dense(", "def _dense_later("))
    with pytest.raises(ImportError) as caught:
        import_file(tmp_path / source.name, f"kgen_test_mixed_{source.stem}")
    assert str(caught.value).endswith(REMEDY)
    assert "cannot import name '_dense'" in str(caught.value.__context__)


def test_a_folder_without_its_launcher_is_not_imported(tmp_path: Path) -> None:
    folder = tmp_path / "incomplete"
    shutil.copytree(
        ROOT / "generated/rms_norm", folder, ignore=shutil.ignore_patterns("_launch.py")
    )
    # the warning that cuda.py is left out; pytest restores the filters
    warnings.simplefilter("ignore")
    with pytest.raises(ImportError, match=r"rms_norm: _launch\.py is missing"):
        import_file(folder / "__init__.py", "incomplete")


def test_an_operand_with_another_number_of_dimensions_is_refused_by_its_own_shape() -> None:
    module: Any = import_file(ROOT / "generated/decode_paged/triton.py", "kgen_test_operands")
    q, k = (
        torch.empty(1, 8, 1, 128, dtype=torch.bfloat16),
        torch.empty(4, 64, 128, dtype=torch.bfloat16),
    )
    for operands, words in (
        ((q, k, k), "k must be a 4-d tensor [pages, page_size, HKV, D], got [4, 64, 128]"),
        ((q[0], k, k), "q must be a 4-d tensor [B, HQ, SQ, D], got [8, 1, 128]"),
        ((q, None, k), "k must be a 4-d tensor [pages, page_size, HKV, D], got NoneType"),
    ):
        with pytest.raises(TypeError, match=re.escape(f"decode_paged: {words}")):
            module.decode_paged(*operands, block_table=None, kv_lens=None)


def test_chips_that_are_too_old_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = import_file(ROOT / "generated/causal/_launch.py", "kgen_test_old")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for why in ("", " for float8_e4m3fn"):
        with pytest.raises(
            ValueError, match=f"^f needs compute capability 8.9 or newer{why}, got 8.0$"
        ):
            module._arch_for("f", 89, why)(torch.device("cuda"))

"""PyTorch programs and caches that use operators of an emitted file or a package, in another folder
and process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.packages.c_on_paper import packages_on_paper

from kgen.verify.interpreter import ENVIRONMENT

GENERATED = Path(__file__).parents[3] / "generated"
MODEL = """
import sys
import torch

sys.path.insert(0, sys.argv[1])
from causal_alibi import causal_alibi


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slopes = torch.nn.Buffer(torch.tensor([0.5, 0.25]))

    def forward(self, q, k, v):
        return 2 * causal_alibi(q + 1, k, v, slopes=self.slopes)


torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 40, 128, dtype=torch.bfloat16) for _ in range(3))
"""
SAVES = """
length = torch.export.Dim("length", max=4096)
program = torch.export.export(Model(), (q, k, v), dynamic_shapes=({2: length},) * 3)
torch.export.save(program, sys.argv[2])
"""
COMPILES_AHEAD = """
length = torch.export.Dim("length", max=4096)
program = torch.export.export(Model(), (q, k, v), dynamic_shapes=({2: length},) * 3)
torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[2])
"""
RUNS = """
for n in (40, 17):
    inputs = [x[:, :, :n].contiguous() for x in (q, k, v)]
    print(torch.equal(program(*inputs), Model()(*inputs)))
"""
LOADS = f"""
program = torch.export.load(sys.argv[2]).module()
{RUNS}
"""
LOADS_COMPILED = f"""
program = torch._inductor.aoti_load_package(sys.argv[2])
{RUNS}
"""
COMPILES = """
from torch._dynamo.utils import counters

q.requires_grad_()
torch.compile(Model(), fullgraph=True)(q, k, v).sum().backward()
print(counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"])
"""


def ran(script: str, *arguments: Path, **environment: str) -> str:
    """Run a script in another process. Return its output."""
    done = subprocess.run(
        [sys.executable, "-c", MODEL + script, *map(str, arguments)],
        env={**os.environ, **ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def origins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders that define the function: the emitted file and a package of it."""
    packages = tmp_path_factory.mktemp("packages")
    packages_on_paper(packages, ["causal_alibi"])
    return {"file": GENERATED / "causal_alibi", "package": packages / "causal_alibi"}


@pytest.fixture(scope="module")
def saved(origins, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A program of each origin. The folder of the function that it was made with is removed."""
    folder = tmp_path_factory.mktemp("saved")
    for name, origin in origins.items():
        shutil.copytree(origin, folder / "here" / "causal_alibi")
        ran(SAVES, folder / "here", folder / f"{name}.pt2")
        shutil.rmtree(folder / "here")
    return {name: folder / f"{name}.pt2" for name in origins}


@pytest.fixture(params=["file, file", "package, package", "file, package", "package, file"])
def folders(origins, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """Two folders with the same function: for making a program and for running it."""
    for place, origin in zip(("here", "there"), request.param.split(", "), strict=True):
        shutil.copytree(origins[origin], tmp_path / place / "causal_alibi")
    return tmp_path / "here", tmp_path / "there"


@pytest.mark.parametrize("here", ["file", "package"])
@pytest.mark.parametrize("there", ["file", "package"])
def test_an_exported_program_runs_in_another_folder_and_process(
    here: str, there: str, origins, saved: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(origins[there], tmp_path / "causal_alibi")
    assert ran(LOADS, tmp_path, saved[here]).split() == ["True", "True"]


@pytest.mark.thorough
@pytest.mark.skipif(not shutil.which("c++"), reason="AOTInductor wants a C++ compiler on the CPU")
def test_a_program_compiled_ahead_runs_in_another_folder_and_process(
    folders, tmp_path: Path
) -> None:
    here, there = folders
    ran(COMPILES_AHEAD, here, tmp_path / "model.pt2")
    shutil.rmtree(here)
    assert ran(LOADS_COMPILED, there, tmp_path / "model.pt2").split() == ["True", "True"]


@pytest.mark.thorough
@pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile wants a C++ compiler on the CPU")
def test_caches_of_torch_compile_hit_in_another_folder_and_process(folders, tmp_path: Path) -> None:
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    here, there = folders
    assert ran(COMPILES, here, **cache).split() == ["0", "0"]
    hits = [int(n) for n in ran(COMPILES, there, **cache).split()]
    assert hits == [2, 1]  # the graphs of forward and backward

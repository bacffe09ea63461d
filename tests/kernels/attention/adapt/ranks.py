"""One of several ranks: `python ranks.py RANK RANKS FOLDER` makes the calls in FOLDER/jobs.json.

Each job calls an emitted package on the first ranks of the world, in Triton's interpreter. Rank 0
compares the results of all ranks with float64. Each rank writes one JSON line per call into
FOLDER/rankN.jsonl.
"""

from __future__ import annotations

import datetime
import importlib
import inspect
import json
import math
import os
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from kgen.kernels.attention.verify.cases import _compare, references
from kgen.kernels.attention.verify.inputs import Case, Inputs, draw, fit
from kgen.kernels.attention.verify.problem import Problem
from kgen.render.project import load
from kgen.verify.families import problem_of


def inputs_of(problem: Problem, job: dict[str, Any]) -> Inputs:
    """Return the tensors of the whole sequence, which are the same on all ranks."""
    case = Case(**{"batch": 2, "heads_kv": 2, "lse": True} | job["case"])
    case = replace(
        case, packed=tuple(map(tuple, case.packed)), batch=1 if case.packed else case.batch
    )
    inputs = draw(problem, fit(problem, case, 1), "cpu")
    for name, value in job.get("given", {}).items():
        inputs.runtime[name] = inputs.params[name] = value
    for name, values in job.get("buffers", {}).items():
        inputs.buffers[name] = torch.tensor(values, dtype=inputs.buffers[name].dtype)
    for head in job.get("without_sink", ()):
        inputs.buffers["sinks"][head] = -math.inf
    return inputs


class Nothing:
    """A transfer that is complete."""

    def wait(self) -> None:
        pass


class Files:
    """Peer memory in files, with the interface of `Peers`."""

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self.group, self.rank = group, dist.get_rank(group)
        folder = Path(sys.argv[3]) / f"peers-{group.group_name}-{size}"
        folder.mkdir(exist_ok=True)
        ranks = range(dist.get_world_size(group))
        self.buffers = [
            torch.from_file(str(folder / str(rank)), shared=True, size=size, dtype=torch.uint8)
            for rank in ranks
        ]

    def begin(self, brief: bool = False) -> bool:
        """Fill the own buffer with NaN, because earlier contents must not be used."""
        self.buffers[self.rank].fill_(255)
        return brief

    def free(self) -> None:
        self.begin()

    def view(
        self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        return self.buffers[rank][offset : offset + size].view(dtype).view(shape)

    def stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def open(self) -> Nothing:
        dist.barrier(self.group)
        return Nothing()

    def copy(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> Nothing:
        for here, there in copies:
            here.copy_(there)
        return Nothing()

    close = open


def see_each_other(package: Any, job: dict[str, Any]) -> None:
    """Give the ranks of a package peer memory if the job requests it. With `brief`, kernels read
    remote keys directly.
    """
    if job.get("peers"):
        exchange: Any = sys.modules[f"{package.__name__}.exchange"]
        exchange.peers_of = lambda group, device, size, agreed: Files(group, size)
        exchange.BRIEF = 2**20 if job.get("brief") else 0


def run(job: dict[str, Any], group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Run forward and backward on this rank. Rank 0 returns the checks of the results."""
    loaded = load(Path(job["spec"]))[0]
    problem = problem_of(loaded)
    inputs = inputs_of(problem, job)
    package = importlib.import_module(f"{problem.name}_context_parallel")
    function, make = getattr(package, problem.name), getattr(package, f"{problem.name}_plan")
    packed, axis = bool(inputs.cu_seqlens), 0 if problem.varlen else 2
    keywords = {**inputs.cache, **inputs.buffers, **inputs.runtime}
    asked = {
        n: x
        for n, x in keywords.items()
        if n in make.__kwdefaults__ or n in make.__code__.co_varnames
    }
    lengths = inputs.cu_seqlens if packed else (inputs.q.shape[2], inputs.k.shape[2])
    heads = {"heads": inputs.q.shape[1], "kv_heads": inputs.k.shape[1]}
    of_layout = sys.modules[f"{package.__name__}.layout"]
    planned = partial(of_layout.planned, gathered=job.get("gathered"))
    see_each_other(package, job)
    with mock.patch.object(of_layout, "planned", planned):
        layout = make(*lengths, **asked, **heads, ranks=group, sharding=job.get("sharding", "auto"))
    shards = {"q": layout.shard(inputs.q, axis), "dout": layout.shard(inputs.dout, axis)}
    shards |= {n: layout.shard(x, axis, keys=True) for n, x in (("k", inputs.k), ("v", inputs.v))}
    shards = {n: x.detach().clone() for n, x in shards.items()}
    dlse = None if inputs.dlse is None else layout.shard(inputs.dlse, inputs.dlse.dim() - 1)
    backward = "backward" in problem.passes
    learned = [b.name for b in problem.buffers if b.grad] if backward else []
    wanted = {n: shards[n].requires_grad_() for n in ("q", "k", "v")} if backward else {}
    wanted |= {n: keywords[n].requires_grad_() for n in learned}
    given: dict[str, Any] = {} if job.get("unplanned") else {"plan": layout}
    operands = *(shards[n] for n in ("q", "k", "v")), *inputs.cu_seqlens
    keywords |= given | {"group": group, "scale": inputs.case.scale, "return_lse": True}
    out, lse = THROUGH[job.get("through", "")](function, operands, keywords, inputs)
    got = {"out": out.detach(), "lse": lse.detach()}
    if backward:
        outputs, cotangents = (out, lse), (shards["dout"], dlse)
        if dlse is None:
            outputs, cotangents = outputs[:1], cotangents[:1]
        grads = torch.autograd.grad(
            outputs, list(wanted.values()), cotangents, materialize_grads=True
        )
        got |= {f"d{n}": x for n, x in zip(wanted, grads, strict=True)}
    heard: list[Any] = [None] * job["ranks"]
    dist.all_gather_object(heard, got, group=group)
    if dist.get_rank() != 0:
        return []
    whole = {}
    for name in got:
        if name[1:] in learned:
            assert all(torch.equal(one[name], got[name]) for one in heard), (
                f"{name} differs between ranks"
            )
            whole[name] = got[name]
        else:
            dim = len(got["lse"].shape) - 1 if name == "lse" else axis
            whole[name] = layout.joined(
                [one[name] for one in heard], dim, keys=name in ("dk", "dv")
            )
    truth, yardstick = references(problem, inputs, tuple(wanted))
    checks = _compare(problem, whole, truth, yardstick, inputs.case.ties)
    return [
        {"name": c.name, "ok": c.ok, "error": c.error, "ratio": c.ratio, "message": c.message}
        for c in checks
    ]


def of_dtensors(
    function: Any, operands: Any, keywords: dict[str, Any], inputs: Inputs
) -> tuple[Any, Any]:
    """Call with DTensors, which contain the sharding, so that no plan is needed."""
    mesh = DeviceMesh.from_group(keywords["group"], "cpu")
    whole = {"run_check": False, "shape": inputs.q.shape, "stride": inputs.q.stride()}
    tensors = [DTensor.from_local(x, mesh, [Shard(2)], **whole) for x in operands]
    out, lse = function(*tensors, scale=keywords["scale"], return_lse=True)
    assert (out.shape, out.placements) == (inputs.q.shape, (Shard(2),))
    return out.to_local(), lse


def in_context_parallel(
    function: Any, operands: Any, keywords: dict[str, Any], inputs: Inputs
) -> tuple[Any, Any]:
    """Call in PyTorch's context, which shards tensors in place with `head_tail`."""
    mesh = DeviceMesh.from_group(keywords["group"], "cpu")
    whole = [x.clone() for x in (inputs.q, inputs.k, inputs.v)]
    with context_parallel(
        mesh, buffers=whole, buffer_seq_dims=[2, 2, 2], no_restore_buffers={*whole}
    ):
        assert all(torch.equal(x, y) for x, y in zip(whole, operands, strict=True))
        return function(*operands, **keywords | {"group": mesh})  # type: ignore[no-any-return]


def compiled(
    function: Any, operands: Any, keywords: dict[str, Any], inputs: Inputs
) -> tuple[Any, Any]:
    """Call as one compiled graph."""
    return torch.compile(function, fullgraph=True, backend="aot_eager")(*operands, **keywords)  # type: ignore[no-any-return]


def under_autocast(
    function: Any, operands: Any, keywords: dict[str, Any], inputs: Inputs
) -> tuple[Any, Any]:
    """Call with float32 tensors under autocast, which converts them to the dtype of the kernels."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return function(*(x.float() for x in operands), **keywords)  # type: ignore[no-any-return]


def turned(
    function: Any, operands: Any, keywords: dict[str, Any], inputs: Inputs
) -> tuple[Any, Any]:
    """Call with [B, S, H, D] memory order, and check that fake results have the strides of the real
    ones.
    """
    module = inspect.getmodule(function)
    operands = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in operands]
    rest = keywords["plan"].numbers, 0.3, keywords["group"].group_name
    plain = [x.detach() for x in operands]
    opcheck(module._out_and_lse_op, (*plain, *rest), test_utils="test_faketensor")  # type: ignore[union-attr]
    kept = module._out_and_lse_op(*plain, *rest)  # type: ignore[union-attr]
    of_backward = torch.ones_like(kept[0]), None, *kept, *plain, *rest
    opcheck(module._backward_op, of_backward, test_utils="test_faketensor")  # type: ignore[union-attr]
    return function(*operands, **keywords)  # type: ignore[no-any-return]


def checkpointed(
    function: Any, operands: Any, keywords: dict[str, Any], inputs: Inputs
) -> tuple[Any, Any]:
    """Call under checkpointing, so that backward recomputes forward."""
    return checkpoint(function, *operands, **keywords, use_reentrant=False)  # type: ignore[no-any-return]


def after_a_failure(
    function: Any, operands: Any, keywords: dict[str, Any], inputs: Inputs
) -> tuple[Any, Any]:
    """Let kernels fail while keys travel. All ranks raise, and their group serves the next call."""
    call = sys.modules[f"{inspect.getmodule(function).__name__}.runtime"].Call  # type: ignore[union-attr]
    for name in ("forward", "backward"):
        with (
            mock.patch.object(call, name, side_effect=ArithmeticError(name)),
            pytest.raises(ArithmeticError, match=name),
        ):
            torch.autograd.grad(function(*operands, **keywords)[0].sum(), operands[0])
    return function(*operands, **keywords)


THROUGH = {
    "": lambda function, operands, keywords, inputs: function(*operands, **keywords),
    "dtensors": of_dtensors,
    "context_parallel": in_context_parallel,
    "compile": compiled,
    "autocast": under_autocast,
    "turned": turned,
    "checkpoint": checkpointed,
    "failure": after_a_failure,
}
"""Code between a model and the function, by name."""
MISTAKES = {
    "heads": lambda tensors: {**tensors, "q": tensors["q"][:, :2]},
    "dtype": lambda tensors: {n: x.half() for n, x in tensors.items()},
    "rows": lambda tensors: {**tensors, "k": tensors["k"][:, :, 1:], "v": tensors["v"][:, :, 1:]},
    "values": lambda tensors: {**tensors, "v": tensors["v"][:, :, 1:]},
    "dtype of v": lambda tensors: {**tensors, "v": tensors["v"].half()},
    "dimensions": lambda tensors: {n: x[0, 0] for n, x in tensors.items()},
    "gone": lambda tensors: os._exit(1),
}
"""Changes that the second of three ranks makes to its tensors."""


def another_pass(call: Any, layout: Any, tensors: dict[str, torch.Tensor]) -> None:
    """The second rank calls backward, the others call forward again."""
    out = call(**{n: x.requires_grad_() for n, x in tensors.items()})
    torch.autograd.grad(out.sum(), tensors["q"]) if dist.get_rank() == 1 else call(**tensors)


def gone_behind(call: Any, layout: Any, tensors: dict[str, torch.Tensor]) -> None:
    """The second rank exits before the backward pass."""
    out = call(**{n: x.requires_grad_() for n, x in tensors.items()})
    os._exit(1) if dist.get_rank() == 1 else torch.autograd.grad(out.sum(), tensors["q"])


def other_rows(call: Any, layout: Any, tensors: dict[str, torch.Tensor]) -> None:
    """The second rank passes fewer rows to `unshard`."""
    layout.unshard(tensors["q"][:, :, dist.get_rank() % 2 :], 2)


DEEDS = {"pass": another_pass, "gone behind": gone_behind, "unshard": other_rows}
"""Other mistakes of the second of three ranks, with the calls of the other ranks."""


def mistaken(job: dict[str, Any], group: dist.ProcessGroup) -> str:
    """Return the error of this rank if the second of three ranks makes a mistake or exits."""
    name = job.get("of", "causal")
    package = importlib.import_module(f"{name}_context_parallel")
    see_each_other(package, job)
    layout = getattr(package, f"{name}_plan")(60, ranks=group, sharding="contiguous")
    tensors = {
        n: torch.zeros(1, 4, 20, job.get("columns", 128), dtype=torch.bfloat16) for n in "qkv"
    }
    call = partial(
        getattr(package, name), plan=layout if job.get("planned", True) else None, group=group
    )
    try:
        if (deed := DEEDS.get(job["mistake"])) is not None:
            deed(call, layout, tensors)
        else:
            call(**MISTAKES[job["mistake"]](tensors) if dist.get_rank() == 1 else tensors)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main() -> None:
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    sys.path.insert(0, str(folder))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)
    store = dist.FileStore(str(folder / "store"), world)
    wait = datetime.timedelta(seconds=250)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=wait)
    jobs = json.loads((folder / "jobs.json").read_text())
    groups = {n: dist.new_group(range(n)) for n in sorted({job["ranks"] for job in jobs})}
    with open(folder / f"rank{rank}.jsonl", "w") as file:
        for job in jobs:
            if rank < job["ranks"]:
                do = mistaken if "mistake" in job else run
                print(json.dumps(do(job, groups[job["ranks"]])), file=file, flush=True)


if __name__ == "__main__":
    main()

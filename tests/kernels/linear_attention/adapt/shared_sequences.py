"""One of several ranks: `python shared_sequences.py RANK RANKS FOLDER` makes the calls in
FOLDER/jobs.json.

Each job calls an emitted package on the first ranks of the world, in Triton's interpreter. Rank 0
compares the results of all ranks with float64, and with the kernels for one rank. Each rank writes
one JSON line per call into FOLDER/rankN.jsonl.
"""

from __future__ import annotations

import datetime
import importlib
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from kgen.kernels.linear_attention.verify.cases import _compare, _terms
from kgen.kernels.linear_attention.verify.eager import eager
from kgen.kernels.linear_attention.verify.inputs import Case, Inputs, differentiable, draw
from kgen.kernels.linear_attention.verify.problem import Problem
from kgen.kernels.linear_attention.verify.reference import STATE, linear_attention
from kgen.render.project import load
from kgen.verify.families import problem_of

Results = dict[str, Tensor]


def inputs_of(problem: Problem, job: dict[str, Any]) -> Inputs:
    """Return the tensors of the whole batch, which are the same on all ranks."""
    case = Case(job["name"], tuple(job["sequences"]), **job.get("case", {}))
    if not problem.varlen:
        case = replace(case, lengths=(sum(case.lengths),), tail=0)
    return draw(problem, case, "cpu")


def gradients(outputs: Results, wanted: Results, cotangents: dict[str, Tensor | None]) -> Results:
    """Return the gradients of a call by name."""
    pairs = [(outputs[n], x) for n, x in cotangents.items() if x is not None and n in outputs]
    of, changes = zip(*((y, x.to(y.dtype)) for y, x in pairs), strict=True)
    grads = torch.autograd.grad(of, list(wanted.values()), changes, materialize_grads=True)
    return {f"d{name}": x for name, x in zip(wanted, grads, strict=True)}


def results(
    function: Callable[..., Any],
    problem: Problem,
    inputs: Inputs,
    cotangents: dict[str, Tensor | None],
    more: dict[str, Any],
) -> Results:
    """Return the outputs of a call and its gradients by name."""
    wanted = differentiable(problem, inputs) if "backward" in problem.passes else {}
    found = function(**inputs.tensors, **inputs.keywords, **more)
    outputs = {"o": found[0], "final_state": found[1]} if isinstance(found, tuple) else {"o": found}
    detached = {name: x.detach() for name, x in outputs.items()}
    return detached | (gradients(outputs, wanted, cotangents) if wanted else {})


def local(problem: Problem, inputs: Inputs, lo: int, hi: int) -> Inputs:
    """Return the inputs of the rank with the tokens `lo` to `hi` - 1."""
    by_token = {"q", "k", "v", *(b.name for b in problem.buffers if b.tokens)}
    tensors = {
        name: (x[:, lo:hi] if name in by_token else x).detach().clone()
        for name, x in inputs.tensors.items()
    }
    return replace(inputs, tensors=tensors)


def share_of(change: Tensor | None, rank: int, ranks: int) -> Tensor | None:
    """Return a rank's part of the gradient of the final states: some ranks do not use them."""
    if change is None or (ranks > 2 and rank == 1):
        return None
    return change * (0.25 if rank == 0 and ranks > 1 else 0.75 if rank + 1 == ranks > 1 else 0.0)


THROUGH: dict[str, Callable[[Any], Any]] = {
    "": lambda function: function,
    "checkpoint": lambda function: partial(checkpoint, function, use_reentrant=False),
    "compile": lambda function: torch.compile(function, backend="eager"),
}
"""Code between a model and the function, by name."""


def run(job: dict[str, Any], group: dist.ProcessGroup) -> Any:
    """Run forward and backward on this rank. Rank 0 returns the checks of the results."""
    problem = problem_of(load(Path(job["spec"]))[0])
    inputs = inputs_of(problem, job)
    package = importlib.import_module(f"{problem.name}_context_parallel")
    rank, ranks = dist.get_rank(group), job["ranks"]
    edges = list(accumulate(job["lengths"], initial=0))
    lo, hi = edges[rank : rank + 2]
    own = local(problem, inputs, lo, hi)
    changes: dict[str, Tensor | None] = {
        "o": inputs.cotangents["o"][:, lo:hi],
        "final_state": share_of(inputs.cotangents.get("final_state"), rank, ranks),
    }
    function = THROUGH[job.get("through", "")](getattr(package, problem.name))
    more = {"group": group} | job.get("more", {})
    got = results(function, problem, own, changes, more)
    heard: list[Any] = [None] * ranks
    dist.all_gather_object(heard, got, group=group)
    if rank:
        return []
    name = f"{problem.name}_part"
    part = getattr(importlib.import_module(f"{package.__name__}.{name}"), name)
    own = local(problem, inputs, 0, edges[-1])
    own.tensors |= {n: x.float() for n, x in own.tensors.items() if n == STATE}
    alone = results(part, problem, own, {**inputs.cotangents}, {})
    return checked(problem, inputs, whole(problem, heard, bool(job.get("more"))), alone)


def whole(problem: Problem, heard: list[Results], parts: bool) -> Results:
    """Return the results of all ranks. With `parts`, ranks have parts of gradients."""
    by_token = {"o", "dq", "dk", "dv", *(f"d{b.name}" for b in problem.buffers if b.tokens)}
    found = {}
    for name, one in heard[0].items():
        if name in by_token:
            found[name] = torch.cat([there[name] for there in heard], 1)
        elif parts and name != "final_state":
            found[name] = sum((there[name].float() for there in heard), torch.zeros(())).to(
                one.dtype
            )
        else:
            assert all(torch.equal(there[name], one) for there in heard), f"{name} differs"
            found[name] = one
    return found


def checked(problem: Problem, inputs: Inputs, got: Results, alone: Results) -> list[dict[str, Any]]:
    """Compare with float64, and with one rank."""
    wanted = tuple(name[1:] for name in got if name not in ("o", "final_state"))
    plain, options = inputs.call(problem), inputs.call(problem, wanted)
    outputs = {n: x for n, x in got.items() if n in ("o", "final_state")}
    grads = {n: x for n, x in got.items() if n not in outputs}
    both = linear_attention, eager
    truth, yardstick = (of(problem, inputs.tensors, plain) for of in both)
    found = _compare(problem, outputs, truth, yardstick, _terms(problem, inputs, truth))
    if grads:
        truth, yardstick = (of(problem, inputs.tensors, options) for of in both)
        found += _compare(problem, grads, truth, yardstick, {})
    return [
        {
            "name": c.name,
            "ok": c.ok,
            "ratio": c.ratio,
            "message": c.message,
            "apart": apart(got[c.name], alone[c.name]),
        }
        for c in found
    ]


def apart(got: Tensor, alone: Tensor) -> float:
    """Return the difference from the results of one rank, relative to their size."""
    size = alone.double().norm()
    return float((got.double() - alone.double()).norm() / size) if size else float(got.norm())


def distributed(own: Inputs, more: dict[str, Any]) -> None:
    """Pass a DTensor."""
    mesh = DeviceMesh.from_group(more["group"], "cpu")
    own.tensors["q"] = DTensor.from_local(own.tensors["q"], mesh, [Shard(1)], run_check=False)


def beyond(own: Inputs, more: dict[str, Any]) -> None:
    """Let the last sequence end after the last token."""
    own.keywords["cu_seqlens"][-1] += 1


MISTAKES: dict[str, Callable[[Inputs, dict[str, Any]], None]] = {
    "heads": lambda own, more: own.tensors.update(
        {n: x[:, :, : x.shape[2] // 2] for n, x in own.tensors.items() if n in ("q", "k", "v")}
    ),
    "scale": lambda own, more: more.update(scale=0.5),
    "offsets": lambda own, more: own.keywords.update(
        cu_seqlens=own.keywords["cu_seqlens"].clamp(max=9)
    ),
    "final": lambda own, more: own.keywords.update(output_final_state=False),
    "distributed": distributed,
    "beyond": beyond,
}
"""Changes that ranks make to their calls: all ranks, or only the last one."""
OF_ALL = ("distributed", "beyond")
"""The changes that all ranks make."""


def mistaken(job: dict[str, Any], group: dist.ProcessGroup) -> str:
    """Return the error of this rank if the last rank makes a mistake."""
    problem = problem_of(load(Path(job["spec"]))[0])
    inputs, more = inputs_of(problem, job), {"group": group}
    package = importlib.import_module(f"{problem.name}_context_parallel")
    lo = 10 * dist.get_rank(group)
    inputs = local(problem, inputs, lo, lo + 10)
    inputs.tensors.pop(STATE)
    if job["mistake"] in OF_ALL or dist.get_rank(group) + 1 == job["ranks"]:
        MISTAKES[job["mistake"]](inputs, more)
    try:
        getattr(package, problem.name)(**inputs.tensors, **inputs.keywords, **more)
    except (RuntimeError, ValueError, TypeError) as error:
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

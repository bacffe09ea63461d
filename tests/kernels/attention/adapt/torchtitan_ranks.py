"""One of several ranks that call a module of torchtitan: `python torchtitan_ranks.py RANK RANKS
FOLDER`. With 0 ranks, a model of torchtitan calls the module.

FOLDER has the emitted package `packed_own_torchtitan`, and `torchtitan` unless it is installed.
Each rank prints the largest relative errors against float64 as one line of JSON.
"""

from __future__ import annotations

import datetime
import importlib
import inspect
import itertools
import json
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

OFFSETS = (0, 17, 18, 50, 72)
HEADS, KEY_HEADS, COLUMNS = 4, 2, 16
ONE = OFFSETS[-1], HEADS, COLUMNS


def gated(out: Tensor, lse: Tensor) -> Tensor:
    """An epilogue that reads the log-sum-exp, like the sinks of GPT-OSS."""
    return out * torch.sigmoid(lse - 0.5)[..., None]


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float, transform: Any) -> Tensor:
    """Causal attention of each document, with all scores in memory. q, k, v: [T, heads, D]."""
    outs = []
    for first, end in itertools.pairwise(OFFSETS):
        one = [x[first:end].transpose(0, 1) for x in (q, k, v)]
        ours, keys, values = (
            one[0],
            *(x.repeat_interleave(len(one[0]) // len(x), 0) for x in one[1:]),
        )
        scores = ours @ keys.mT * scale
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
        out, lse = scores.softmax(-1) @ values, scores.logsumexp(-1)
        outs.append((transform(out, lse) if transform else out).transpose(0, 1))
    return torch.cat(outs)


def errors(layout: str, transform: Any, mesh: Any, sharding: str) -> dict[str, float]:
    """Return the error of the output and of each gradient for the tokens of this rank."""
    package = importlib.import_module("packed_own_torchtitan")
    titan = importlib.import_module("torchtitan.models.common.attention")
    torch.manual_seed(0)
    shapes = [ONE, *((ONE[0], KEY_HEADS, COLUMNS),) * 2]
    tensors = [torch.randn(shape) for shape in shapes]
    dout = torch.randn(ONE)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    masks = titan.VarlenMetadata(offsets, offsets, 32, 32)
    exact = [x.double().requires_grad_() for x in tensors]
    wanted = reference(*exact, 0.3, transform)
    wanted.backward(dout.double())
    module = package.Attention.Config().build()
    package.over_ranks(torch.nn.Sequential(module), mesh, sharding)

    def own(x: Tensor) -> Tensor:
        """Return the rows of this rank."""
        plan = package.planned(masks, mesh, sharding) if mesh is not None else None
        return plan.shard(x, dim=0) if plan is not None else x

    given = [own(x).clone().requires_grad_() for x in tensors]
    rows = [x[None] for x in given] if layout == "BLNH" else given
    out = module(*rows, attention_masks=masks, scale=0.3, enable_gqa=True, out_transform=transform)
    assert out.shape == rows[0].shape, out.shape
    out = out.flatten(0, -3)
    out.backward(own(dout))
    found = [out.detach(), *(x.grad for x in given)]
    expected = [own(x).detach() for x in (wanted, *(x.grad for x in exact))]
    names = ("out", "dq", "dk", "dv")
    return {
        name: float((a - b).abs().max() / b.abs().max())
        for name, a, b in zip(names, found, expected, strict=True)
    }


def llama() -> dict[str, float]:
    """Return the errors of the logits and gradients of torchtitan's small Llama 3.

    The model packs documents into one row. Its other copy has an attention in PyTorch.
    """
    package = importlib.import_module("packed_own_torchtitan")
    titan = importlib.import_module("torchtitan.models.common.attention")
    configs = importlib.import_module("torchtitan.models.llama3").llama3_configs

    class Plain(titan.VarlenAttention):  # type: ignore[misc, name-defined]
        @dataclass(kw_only=True, slots=True)
        class Config(titan.VarlenAttention.Config):  # type: ignore[misc, name-defined]
            pass

        def __init__(self, config: Any) -> None:
            torch.nn.Module.__init__(self)

        def forward(
            self, q: Tensor, k: Tensor, v: Tensor, *, scale: Any = None, **_: Any
        ) -> Tensor:
            rows = [x.flatten(0, -3) for x in (q, k, v)]
            scale = COLUMNS**-0.5 if scale is None else scale
            return reference(*rows, scale, None).view(q.shape)

    torch.manual_seed(0)
    folded = "q_TNH" in inspect.signature(titan.VarlenAttention.forward).parameters
    tokens, results = torch.randint(0, 256, (OFFSETS[-1],)), []
    runs = itertools.pairwise(OFFSETS)
    positions = torch.cat([torch.arange(end - first) for first, end in runs])
    rows = [x if folded else x[None] for x in (tokens, positions)]
    for own in (Plain, package.Attention):
        torch.manual_seed(1)
        config = configs["debugmodel"]("varlen")
        for layer in config.layers:
            layer.attention.inner_attention = own.Config()
        model = config.build().float()
        model.init_states()
        masks = model.get_attention_masks(positions=rows[1])
        logits = model(rows[0], positions=rows[1], attention_masks=masks).flatten(0, -2)
        torch.nn.functional.cross_entropy(logits, tokens.roll(-1)).backward()
        results.append(
            {"logits": logits.detach(), **{n: p.grad for n, p in model.named_parameters()}}
        )
    plain, ours = results
    return {n: float((ours[n] - x).abs().max() / x.abs().max()) for n, x in plain.items()}


def main() -> None:
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    sys.path.append(str(folder))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mesh = None
    if ranks == 0:
        print(json.dumps(llama()))
        return
    if ranks > 1:
        store = dist.FileStore(str(folder / "store"), ranks)
        wait = datetime.timedelta(seconds=200)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=wait)
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))["cp"]
    found = {}
    for layout in ("TNH", "BLNH"):
        for transform in (None, gated):
            for sharding in ("auto",) if mesh is None else ("contiguous", "head_tail"):
                name = f"{layout}{' with lse' if transform else ''} {sharding}"
                found[name] = errors(layout, transform, mesh, sharding)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Train a small transformer with windowed attention and sinks. Each sequence is sharded over all
ranks.

    kgen adapt gpt_oss --for context_parallel
    torchrun --nproc-per-node 2 examples/context_parallel.py

Compare the losses with the losses of one rank: `--nproc-per-node 1`. On a machine without GPUs,
TRITON_INTERPRET=1 runs the script on the CPU. FSDP2 shards the parameters over the same ranks. The
backward pass recomputes the activations.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--adapters", default="adapters", help="output folder of `kgen adapt`")
parser.add_argument("--length", type=int, default=300, help="tokens per sequence")
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--layers", type=int, default=2)
options = parser.parse_args()
sys.path.insert(0, options.adapters)

from gpt_oss_context_parallel import gpt_oss, gpt_oss_plan  # noqa: E402

HEADS, KV_HEADS, HEAD, WORDS = 8, 1, 64, 64
WIDTH = 128


class Layer(nn.Module):
    """Attention with rotary positions, a window of 128 and sinks, followed by two linear layers."""

    def __init__(self):
        super().__init__()
        self.norm, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD, bias=False)
        self.out = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.sinks = nn.Parameter(torch.zeros(HEADS))

    def forward(self, x, plan, rotation):
        batch, rows, _ = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, rows, -1, HEAD).transpose(1, 2)
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
        q, k = (rotated(part, *rotation).bfloat16() for part in (q, k))
        # FSDP sums the gradients of parameters, so the kernel must not sum the gradient of the
        # sinks.
        out = gpt_oss(q, k, v.bfloat16(), sinks=self.sinks, plan=plan, reduce_gradients=False)
        x = x + self.out(out.transpose(1, 2).reshape(batch, rows, -1).to(x.dtype))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


def rotated(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(options.layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens, plan):
        angles = plan.positions(tokens.device)[:, None] / 10000 ** torch.linspace(
            0, 1, HEAD // 2, device=tokens.device
        )
        x = self.words(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, plan, (angles.cos(), angles.sin()), use_reentrant=False)
        return self.head(x)


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = Model().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = torch.randint(
        0, WORDS, (2, options.length + 1), generator=torch.Generator().manual_seed(1)
    ).to(device)
    plan = gpt_oss_plan(options.length, heads=HEADS, kv_heads=KV_HEADS, ranks=mesh)
    tokens, targets = plan.shard(text[:, :-1], dim=1), plan.shard(text[:, 1:], dim=1)
    for step in range(options.steps):
        logits = model(tokens, plan)
        # The mean over all tokens. FSDP averages gradients over ranks, so the loss is multiplied by
        # `ranks`.
        loss = (
            F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            / targets.shape[0]
            / options.length
        )
        (loss * ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.5f}", flush=True)
    dist.destroy_process_group()


main()

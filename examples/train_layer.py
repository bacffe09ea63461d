"""Train one transformer layer with norms and attention from kgen.

    kgen render rms_norm causal_d64
    python examples/train_layer.py

On a machine without a GPU, TRITON_INTERPRET=1 runs the script on the CPU. The layer learns to
predict the previous token. The script prints the loss of each step.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--generated", default="generated", help="output folder of `kgen render`")
parser.add_argument("--length", type=int, default=32, help="tokens per sequence")
parser.add_argument("--steps", type=int, default=8)
options = parser.parse_args()
sys.path.insert(0, options.generated)

from causal_d64 import causal_d64  # noqa: E402
from rms_norm import rms_norm  # noqa: E402

HEADS, HEAD, WORDS = 2, 64, 16
WIDTH = HEADS * HEAD


class Norm(nn.Module):
    """An RMS norm with a learned weight, in bfloat16."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))

    def forward(self, x):
        return rms_norm(x, self.weight)


class Layer(nn.Module):
    """Causal attention, then two linear layers, each with a norm and a residual connection."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, dtype=torch.bfloat16)
        self.places = nn.Embedding(options.length, WIDTH, dtype=torch.bfloat16)
        self.norm, self.norm_2 = Norm(), Norm()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False, dtype=torch.bfloat16)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, dtype=torch.bfloat16)
        self.down = nn.Linear(4 * WIDTH, WIDTH, dtype=torch.bfloat16)
        self.named = nn.Linear(WIDTH, WORDS, dtype=torch.bfloat16)

    def forward(self, tokens):
        batch, length = tokens.shape
        x = self.words(tokens) + self.places.weight[:length]
        # [batch, length, 3 * width] -> three views [batch, heads, length, head]; the kernels accept
        # any strides.
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        out = causal_d64(q, k, v)
        x = x + self.out(out.transpose(1, 2).reshape(batch, length, WIDTH))
        x = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return self.named(x)


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
layer = Layer().to(device)
optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
tokens = torch.randint(WORDS, (2, options.length), device=device)
for step in range(options.steps):
    loss = F.cross_entropy(layer(tokens)[:, 1:].flatten(0, 1).float(), tokens[:, :-1].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")

"""Decode with a paged cache. Each step appends a key and a value per sequence and attends to all of
them.

    kgen render decode_paged
    python examples/paged_decoding.py

On a machine without a GPU, TRITON_INTERPRET=1 runs the script on the CPU. Sequences have different
lengths, and their pages are in random order. For each step the script prints the largest difference
to attention over contiguous keys.
"""

import argparse
import sys

import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--generated", default="generated", help="output folder of `kgen render`")
parser.add_argument(
    "--lengths", type=int, nargs="+", default=[5, 63, 100], help="cached tokens of each sequence"
)
parser.add_argument("--steps", type=int, default=2)
options = parser.parse_args()
sys.path.insert(0, options.generated)

from decode_paged import decode_paged  # noqa: E402

PAGE, HEAD, KV_HEADS, GROUP = 64, 128, 2, 4


class PagedCache:
    """Keys and values of several sequences in a shared pool of pages of 64 tokens."""

    def __init__(self, sequences, most_tokens, device):
        pages = -(-most_tokens // PAGE)  # per sequence
        shape = (sequences * pages, PAGE, KV_HEADS, HEAD)
        self.k = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.v = torch.zeros_like(self.k)
        order = torch.randperm(sequences * pages, device=device, dtype=torch.int32)
        self.block_table = order.view(sequences, pages)
        self.lengths = torch.zeros(sequences, dtype=torch.int32, device=device)

    def append(self, k, v, sequences):
        """Append one token to each of the listed sequences. k and v are [sequences, KV_HEADS,
        HEAD].
        """
        places = self.lengths[sequences].long()
        pages = self.block_table[sequences, places // PAGE].long()
        self.k[pages, places % PAGE] = k
        self.v[pages, places % PAGE] = v
        self.lengths[sequences] += 1

    def attend(self, q):
        """Return attention of the last token of each sequence, [sequences, heads, 1, HEAD], to all
        its tokens.
        """
        return decode_paged(q, self.k, self.v, block_table=self.block_table, kv_lens=self.lengths)

    def dense(self, sequence):
        """Return contiguous keys and values of one sequence, [1, KV_HEADS, length, HEAD]."""
        pages = self.block_table[sequence].long()
        length = int(self.lengths[sequence])
        return (x[pages].flatten(0, 1)[:length].transpose(0, 1)[None] for x in (self.k, self.v))


def token(*shape):
    return torch.randn(*shape, HEAD, dtype=torch.bfloat16, device=device)


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
sequences = len(options.lengths)
cache = PagedCache(sequences, max(options.lengths) + options.steps, device)
for place in range(max(options.lengths)):
    longer = torch.tensor([i for i, n in enumerate(options.lengths) if place < n], device=device)
    cache.append(token(len(longer), KV_HEADS), token(len(longer), KV_HEADS), longer)
for step in range(options.steps):
    everyone = torch.arange(sequences, device=device)
    cache.append(token(sequences, KV_HEADS), token(sequences, KV_HEADS), everyone)
    q = token(sequences, GROUP * KV_HEADS, 1)
    out = cache.attend(q)
    worst = 0.0
    for i in range(sequences):
        k, v = cache.dense(i)
        wanted = F.scaled_dot_product_attention(
            q[i : i + 1].float(), k.float(), v.float(), enable_gqa=True
        )
        worst = max(worst, (out[i : i + 1].float() - wanted).abs().max().item())
    print(f"step {step}: {cache.lengths.tolist()} tokens, largest difference {worst:.4f}")

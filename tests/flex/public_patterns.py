"""Sources as people write them around FlexAttention: masks and scores of public models and
articles, written anew.

`READ` has sources by name, with the functions to import. `REFUSED` also has the line and the reason
of the error.
"""

from __future__ import annotations

READ: dict[str, tuple[dict[str, str], str]] = {}
REFUSED: dict[str, tuple[dict[str, str], int, str, str, str]] = {}


def mask(name: str, expr: str, source: str) -> None:
    READ[name] = ({"mask_mod": expr}, source)


def score(name: str, expr: str, source: str) -> None:
    READ[name] = ({"score_mod": expr}, source)


def both(name: str, score_mod: str, mask_mod: str, source: str) -> None:
    READ[name] = ({"score_mod": score_mod, "mask_mod": mask_mod}, source)


FLEX = "from torch.nn.attention.flex_attention import {}\n"

mask(
    "causal",
    "causal_mask",
    FLEX.format("create_block_mask, flex_attention")
    + """
import torch

SEQ_LEN = 64
device = "cuda" if torch.cuda.is_available() else "cpu"

def causal_mask(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx

block_mask = create_block_mask(
    causal_mask, B=None, H=None, Q_LEN=SEQ_LEN, KV_LEN=SEQ_LEN, device=device
)
""",
)
mask(
    "sliding window",
    "sliding_window_causal",
    FLEX.format("and_masks, create_block_mask")
    + """
SLIDING_WINDOW = 24

def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx

def window(b, h, q_idx, kv_idx):
    return q_idx - kv_idx <= SLIDING_WINDOW

sliding_window_causal = and_masks(causal, window)
sliding_window_causal.__name__ = f"sliding_window_{SLIDING_WINDOW}"
bm = create_block_mask(sliding_window_causal, None, None, 64, 64, device="cpu")
""",
)
mask(
    "prefix language model",
    "prefix_lm_causal",
    FLEX.format("or_masks, create_block_mask")
    + """
import torch

torch.manual_seed(0)
prefix_length = torch.randint(1, 40, (2,), dtype=torch.int32)

def causal_mask(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx

def prefix_mask(b, h, q_idx, kv_idx):
    return kv_idx <= prefix_length[b]

prefix_lm_causal = or_masks(prefix_mask, causal_mask)
""",
)
mask(
    "documents",
    "generate_doc_mask_mod(causal_mask, document_id)",
    """
import torch
from typing import Callable

def causal_mask(b, h, q, kv):
    return q >= kv

def _offsets_to_doc_ids(offsets: torch.Tensor) -> torch.Tensor:
    counts = offsets[1:] - offsets[:-1]
    return torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), counts)

offsets = torch.tensor([0, 11, 30, 47, 64])
document_id = _offsets_to_doc_ids(offsets)

def generate_doc_mask_mod(mask_mod: Callable, doc_id: torch.Tensor) -> Callable:
    def doc_mask_mod(b, h, q_idx, kv_idx):
        same_doc = doc_id[q_idx] == doc_id[kv_idx]
        q_logical = q_idx
        kv_logical = kv_idx
        inner_mask = mask_mod(b, h, q_logical, kv_logical)
        return same_doc & inner_mask

    return doc_mask_mod
""",
)
mask(
    "documents by offsets",
    "packed_mask",
    """
import torch

lengths = [9, 20, 3, 32]
cu_seqlens = torch.tensor([0] + lengths, dtype=torch.int32).cumsum(0).to(torch.int32)
doc_ids = torch.searchsorted(cu_seqlens, torch.arange(64, dtype=torch.int32), right=True) - 1

def packed_mask(b, h, q_idx, kv_idx):
    causal = q_idx >= kv_idx
    same = doc_ids[q_idx] == doc_ids[kv_idx]
    real = (q_idx < cu_seqlens[-1]) & (kv_idx < cu_seqlens[-1])
    return causal & same & real
""",
)
mask(
    "documents by end of text",
    "mask_mod",
    """
import torch

EOS = 2
torch.manual_seed(1)
tokens = torch.randint(0, 12, (2, 64))
docs = (tokens == EOS).cumsum(dim=-1)

def mask_mod(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (docs[b, q_idx] == docs[b, kv_idx])
""",
)
score(
    "ALiBi",
    "generate_alibi_bias(4)",
    """
import math
import torch

def generate_alibi_bias(H: int):
    def alibi_mod(score, b, h, q_idx, kv_idx):
        scale = torch.exp2(-((h + 1) * 8.0 / H))
        bias = (kv_idx - q_idx) * scale
        return score + bias
    return alibi_mod
""",
)
score(
    "ALiBi with slopes",
    "ALiBi(4)",
    """
import math
import torch

def get_slopes(n):
    def get_slopes_power_of_2(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start ** i for i in range(n)]
    if math.log2(n).is_integer():
        return get_slopes_power_of_2(n)
    closest = 2 ** math.floor(math.log2(n))
    return get_slopes_power_of_2(closest) + get_slopes(2 * closest)[0::2][: n - closest]

class ALiBi:
    def __init__(self, num_heads: int):
        self.slopes = torch.tensor(get_slopes(num_heads))

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score - self.slopes[h] * (q_idx - kv_idx).abs()
""",
)
both(
    "Gemma 2",
    "softcap",
    "local_mask",
    """
from functools import partial
import torch
from torch import Tensor

ATTN_LOGIT_SOFTCAPPING = 50.0
SLIDING_WINDOW = 16

def tanh_softcap(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, soft_cap: float
) -> Tensor:
    return soft_cap * torch.tanh(score / soft_cap)

softcap = partial(tanh_softcap, soft_cap=ATTN_LOGIT_SOFTCAPPING)

def local_mask(b, h, q_idx, kv_idx):
    return torch.logical_and(q_idx >= kv_idx, q_idx - kv_idx < SLIDING_WINDOW)
""",
)
mask(
    "Gemma 3",
    "make_mask(config, layer_idx=4)",
    """
from dataclasses import dataclass
from enum import Enum

class AttentionType(Enum):
    LOCAL = "sliding_attention"
    GLOBAL = "full_attention"

@dataclass(frozen=True)
class GemmaConfig:
    sliding_window: int = 16
    sliding_window_pattern: int = 6
    image_token: int = 7

config = GemmaConfig(sliding_window=12)

def layer_type(config, layer_idx):
    last = (layer_idx + 1) % config.sliding_window_pattern == 0
    return AttentionType.GLOBAL if last else AttentionType.LOCAL

def make_mask(config, layer_idx):
    kind = layer_type(config, layer_idx)
    match kind:
        case AttentionType.LOCAL:
            def mod(b, h, q, kv):
                return (kv <= q) & (kv > q - config.sliding_window)
        case AttentionType.GLOBAL:
            def mod(b, h, q, kv):
                return kv <= q
        case _:
            raise ValueError(f"{kind}")
    return mod
""",
)
mask(
    "Mistral's rolling window",
    "MistralMask(window=16).mask_mod",
    """
import torch.nn as nn

class MistralMask(nn.Module):
    def __init__(self, window: int | None = None):
        super().__init__()
        self.window = window

    def mask_mod(self, b, h, q_idx, kv_idx):
        keep = q_idx >= kv_idx
        if self.window is not None:
            keep = keep & (q_idx - kv_idx < self.window)
        return keep
""",
)
mask(
    "Longformer",
    "longformer(8, is_global)",
    """
import torch

torch.manual_seed(0)
is_global = torch.rand(2, 64) < 0.1

def longformer(w, is_global):
    half = w // 2
    def mask_mod(b, h, q_idx, kv_idx):
        local = (q_idx - kv_idx).abs() <= half
        return local | is_global[b, q_idx] | is_global[b, kv_idx]
    return mask_mod
""",
)
mask(
    "BigBird",
    "bigbird",
    """
import torch

BLOCK, N = 8, 64
g = torch.Generator().manual_seed(0)
random_blocks = torch.rand(4, N // BLOCK, N // BLOCK, generator=g) < 0.25

def bigbird(b, h, q_idx, kv_idx):
    qb, kb = q_idx // BLOCK, kv_idx // BLOCK
    window = torch.abs(qb - kb) <= 1
    glob = (qb == 0) | (kb == 0) | (qb == N // BLOCK - 1) | (kb == N // BLOCK - 1)
    return window | glob | random_blocks[h, qb, kb]
""",
)
mask(
    "attention sinks",
    "streaming_llm()",
    """
def streaming_llm(num_sinks: int = 4, window_size: int = 20):
    assert num_sinks >= 0, "sinks must not be negative"
    assert window_size > 0

    def streaming_mask(b, h, q_idx, kv_idx):
        causal = q_idx >= kv_idx
        in_window = q_idx - kv_idx < window_size
        is_sink = kv_idx < num_sinks
        return causal & (in_window | is_sink)

    return streaming_mask
""",
)
mask(
    "shifted windows of Swin",
    "ShiftedWindow(8, 4, 2)",
    """
class ShiftedWindow:
    \"\"\"Tokens of an image in raster order; windows are rolled by `shift`.\"\"\"

    def __init__(self, size, window, shift=0):
        self.size, self.window, self.shift = size, window, shift

    def region(self, x):
        return (x >= self.size - self.window).int() + (x >= self.size - self.shift).int()

    def __call__(self, b, h, q_idx, kv_idx):
        qy, qx = q_idx // self.size, q_idx % self.size
        ky, kx = kv_idx // self.size, kv_idx % self.size
        same_row = qy // self.window == ky // self.window
        same_window = same_row & (qx // self.window == kx // self.window)
        if self.shift == 0:
            return same_window
        same_region = (self.region(qy) == self.region(ky)) & (self.region(qx) == self.region(kx))
        return same_window & same_region
""",
)
score(
    "T5's buckets",
    "T5Bias(num_heads=4).score_mod",
    """
import math
import torch
from torch import nn

class T5Bias(nn.Module):
    def __init__(self, num_heads, num_buckets=16, max_distance=48, bidirectional=False):
        super().__init__()
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.bidirectional = bidirectional
        self.relative_attention_bias = nn.Parameter(torch.randn(num_buckets, num_heads))

    def _bucket(self, relative_position):
        num_buckets = self.num_buckets
        buckets = 0
        if self.bidirectional:
            num_buckets //= 2
            buckets = (relative_position > 0).to(torch.long) * num_buckets
            relative_position = torch.abs(relative_position)
        else:
            relative_position = -torch.min(relative_position, torch.zeros_like(relative_position))
        max_exact = num_buckets // 2
        is_small = relative_position < max_exact
        large = max_exact + (
            torch.log(relative_position.float() / max_exact)
            / math.log(self.max_distance / max_exact)
            * (num_buckets - max_exact)
        ).to(torch.long)
        large = torch.min(large, torch.full_like(large, num_buckets - 1))
        return buckets + torch.where(is_small, relative_position, large)

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score + self.relative_attention_bias[self._bucket(kv_idx - q_idx), h]
""",
)
mask(
    "two-dimensional neighborhood",
    "generate_natten(canvas_h=8, canvas_w=8, kernel_h=5, kernel_w=3)",
    """
from typing import Tuple
import torch
from torch import IntTensor

def generate_natten(canvas_h: int, canvas_w: int, kernel_h: int, kernel_w: int):
    def get_x_y(idx: IntTensor) -> Tuple[IntTensor, IntTensor]:
        return idx // canvas_w, idx % canvas_w

    def natten_mask(b, h, q_idx, kv_idx):
        q_x, q_y = get_x_y(q_idx)
        kv_x, kv_y = get_x_y(kv_idx)
        center_x = q_x.clamp(kernel_h // 2, (canvas_h - 1) - kernel_h // 2)
        center_y = q_y.clamp(kernel_w // 2, (canvas_w - 1) - kernel_w // 2)
        hori = (center_x - kv_x).abs() <= kernel_h // 2
        vert = (center_y - kv_y).abs() <= kernel_w // 2
        return hori & vert

    natten_mask.__name__ = f"natten_c{canvas_h}x{canvas_w}"
    return natten_mask
""",
)
mask(
    "three-dimensional neighborhood",
    "Volume(4, 4, 4).mask((3, 3, 1))",
    """
from typing import NamedTuple

class Volume(NamedTuple):
    t: int
    h: int
    w: int

    def split(self, i):
        return i // (self.h * self.w), i // self.w % self.h, i % self.w

    def mask(self, kernel):
        def mod(b, h, q_idx, kv_idx):
            keep = None
            for q, k, n in zip(self.split(q_idx), self.split(kv_idx), kernel):
                near = (q - k).abs() <= n // 2
                keep = near if keep is None else keep & near
            return keep
        return mod
""",
)
mask(
    "dilated window",
    "dilated",
    """
window_size, dilation = 24, 4

dilated = lambda b, h, q, kv: ((q - kv).abs() <= window_size) & ((q - kv) % dilation == 0)
""",
)
score(
    "latent attention with YaRN",
    "MLAScore(mscale=0.707, factor=40.0)",
    """
import math

def yarn_get_mscale(scale=1.0, mscale=1.0):
    if scale <= 1:
        return 1.0
    return 0.1 * mscale * math.log(scale) + 1.0

class MLAScore:
    qk_nope_head_dim = 128
    qk_rope_head_dim = 64

    def __init__(self, mscale, factor):
        m = yarn_get_mscale(factor, mscale)
        self.factor = m * m

    @property
    def qk_head_dim(self):
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score * self.factor * (self.qk_head_dim ** -0.5 * math.sqrt(192))
""",
)
mask(
    "tree of candidates",
    "tree_mask",
    """
import torch

PREFIX = 50
# node -> parent, -1 for children of the root
parents = [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
ancestor = torch.zeros(len(parents), len(parents), dtype=torch.bool)
for i, p in enumerate(parents):
    ancestor[i, i] = True
    while p >= 0:
        ancestor[i, p] = True
        p = parents[p]

def tree_mask(b, h, q_idx, kv_idx):
    in_prefix = kv_idx < PREFIX
    q_node = (q_idx - PREFIX).clamp(min=0)
    kv_node = (kv_idx - PREFIX).clamp(min=0)
    in_tree = (q_idx >= PREFIX) & (kv_idx >= PREFIX) & ancestor[q_node, kv_node]
    return torch.where(q_idx < PREFIX, q_idx >= kv_idx, in_prefix | in_tree)
""",
)
mask(
    "jagged sequences",
    "make_jagged_mask(offsets)",
    """
import torch

offsets = torch.tensor([0, 7, 40, 64], dtype=torch.int64)

def make_jagged_mask(offsets):
    seq_idx = torch.bucketize(torch.arange(64), offsets[1:], right=True)
    starts = offsets[seq_idx]

    def jagged(b, h, q_idx, kv_idx):
        same = seq_idx[q_idx] == seq_idx[kv_idx]
        q_rel = q_idx - starts[q_idx]
        kv_rel = kv_idx - starts[kv_idx]
        return same & (q_rel - kv_rel >= 0) & (q_rel - kv_rel < 10)

    return jagged
""",
)
mask(
    "pages",
    "PagedMask(physical_to_logical, lengths).convert(causal)",
    """
import torch

page_size = 8
torch.manual_seed(0)
physical_to_logical = torch.stack([torch.randperm(8) for _ in range(2)]).to(torch.int32)
physical_to_logical[0, 3] = -1
lengths = torch.tensor([50, 33], dtype=torch.int32)

def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx

class PagedMask:
    def __init__(self, table, lengths):
        self.table, self.lengths = table, lengths

    def convert(self, mask_mod):
        table = self.table

        def new_mask_mod(b, h, q_idx, physical_kv_idx):
            block = physical_kv_idx // page_size
            logical_block = table[b, block]
            logical_kv_idx = logical_block * page_size + physical_kv_idx % page_size
            live = (logical_block >= 0) & (logical_kv_idx < self.lengths[b])
            return torch.where(live, mask_mod(b, h, q_idx, logical_kv_idx), False)

        return new_mask_mod
""",
)
mask(
    "block diffusion",
    "partial(block_diff_mask, block_size=4, n=32)",
    """
from functools import partial
import torch

def block_diff_mask(b, h, q_idx, kv_idx, block_size=None, n=None):
    x0_flag_q = (q_idx >= n)
    x0_flag_kv = (kv_idx >= n)
    block_q = torch.where(x0_flag_q == 1, (q_idx - n) // block_size, q_idx // block_size)
    block_kv = torch.where(x0_flag_kv == 1, (kv_idx - n) // block_size, kv_idx // block_size)
    block_diagonal = (block_q == block_kv) & (x0_flag_q == x0_flag_kv)
    offset_block_causal = ((block_q > block_kv) & (x0_flag_kv == 1) & (x0_flag_q == 0))
    block_causal = (block_q >= block_kv) & (x0_flag_kv == 1) & (x0_flag_q == 1)
    return block_diagonal | offset_block_causal | block_causal
""",
)
mask(
    "Transfusion",
    "transfusion_attn_mask(modality_positions)",
    """
import torch

def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx

def modality(offset, length):
    def mask_fn(b, h, q_idx, kv_idx):
        return (q_idx >= offset) & (kv_idx < (offset + length))
    return mask_fn

# batch, spans, (kind, offset, length)
modality_positions = torch.tensor([[[0, 3, 8], [1, 30, 12]], [[1, 0, 5], [0, 0, 0]]])

def transfusion_attn_mask(modalities):
    modalities = modalities.long()

    def mask_mod(b, h, q_idx, kv_idx):
        mask = causal(b, h, q_idx, kv_idx)
        for _, offset, length in modalities[b]:
            mask = mask | modality(offset, length)(b, h, q_idx, kv_idx)
        return mask

    return mask_mod
""",
)
mask(
    "tree of prefixes",
    "prefix_tree",
    """
import torch

# each branch of a token: its branch, and the interval of branches below it
enter = torch.tensor([0] * 20 + [1] * 10 + [2] * 10 + [3] * 24)
leave = torch.tensor([4] * 20 + [3] * 10 + [3] * 10 + [4] * 24)

def prefix_tree(b, h, q_idx, kv_idx):
    below = (enter[kv_idx] <= enter[q_idx]) & (enter[q_idx] < leave[kv_idx])
    return below & (q_idx >= kv_idx)
""",
)
mask(
    "offsets of a ring",
    "RingRank(rank=1, world=4, local=16).at(step=1)",
    """
class RingRank:
    def __init__(self, rank, world, local):
        self.rank, self.world, self.local = rank, world, local

    def at(self, step):
        source = (self.rank - step) % self.world
        q_off, kv_off = self.rank * self.local, source * self.local
        return lambda b, h, q_idx, kv_idx: q_idx + q_off >= kv_idx + kv_off
""",
)
score(
    "learned bias of heads",
    "BiasedAttention(4).score_mod",
    """
import torch
import torch.nn as nn

class BiasedAttention(nn.Module):
    def __init__(self, n_heads):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(n_heads))
        self.scale = nn.Parameter(torch.ones(n_heads))
        self.qkv = nn.Linear(64, 192)

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score * self.scale[h] + self.bias[h]

    def forward(self, x):
        return self.qkv(x)
""",
)
score(
    "table of relative positions",
    "make_rpe(rpe_table, 64)",
    """
import torch

torch.manual_seed(3)
rpe_table = torch.nn.Parameter(torch.randn(4, 2 * 64 - 1) * 0.02)

def make_rpe(table, length):
    def rpe(score, b, h, q_idx, kv_idx):
        return score + table[h, q_idx - kv_idx + (length - 1)]
    return rpe
""",
)
score(
    "Graphormer",
    "graphormer",
    """
import torch

torch.manual_seed(4)
MAX_DIST = 6
spatial_pos = torch.randint(0, 10, (2, 64, 64))
bias = torch.nn.Parameter(torch.randn(MAX_DIST + 1, 4))

def graphormer(score, b, h, q_idx, kv_idx):
    distance = torch.clamp(spatial_pos[b, q_idx, kv_idx], max=MAX_DIST)
    return torch.where(spatial_pos[b, q_idx, kv_idx] > 8, float("-inf"), score + bias[distance, h])
""",
)
score(
    "cosine scores",
    "cosine_score",
    """
import math
import torch

q_norm = torch.rand(2, 4, 64) + 0.5
k_norm = torch.rand(2, 4, 64) + 0.5
logit_scale = torch.nn.Parameter(torch.log(10 * torch.ones(4)))

def cosine_score(score, b, h, q_idx, kv_idx):
    cos = score / (q_norm[b, h, q_idx] * k_norm[b, h, kv_idx]).clamp_min(1e-6)
    return cos * logit_scale[h].clamp(max=math.log(1.0 / 0.01)).exp()
""",
)
score(
    "gates of keys",
    "forgetting",
    """
import torch
import torch.nn.functional as F

torch.manual_seed(5)
log_f = F.logsigmoid(torch.randn(2, 4, 64) + 2)
cum = log_f.cumsum(-1)

def forgetting(score, b, h, q_idx, kv_idx):
    return score + cum[b, h, q_idx] - cum[b, h, kv_idx]
""",
)
score(
    "sigmoid gate",
    "gate",
    """
import torch
from torch.nn import functional as F

gate_logit = torch.nn.Parameter(torch.zeros(4))

def gate(score, b, h, q_idx, kv_idx):
    g = F.sigmoid(gate_logit[h] - 0.1 * (q_idx - kv_idx).abs())
    return g * score + torch.log(g)
""",
)
score(
    "decay of xPos",
    "xpos",
    """
import torch

SCALE_BASE = 512
zeta = (torch.arange(4) / 4 + 0.4) / 1.4

def xpos(score, b, h, q_idx, kv_idx):
    power = (q_idx - kv_idx) / SCALE_BASE
    return score * zeta[h] ** power
""",
)
both(
    "retention",
    "Retention(4).score_mod",
    "Retention.mask_mod",
    """
import torch

class Retention:
    def __init__(self, heads):
        gamma = 1 - torch.exp2(-5 - torch.arange(heads, dtype=torch.float32))
        self.log_gamma = torch.log(gamma)

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score + (q_idx - kv_idx) * self.log_gamma[h]

    @staticmethod
    def mask_mod(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx
""",
)
score(
    "clipped scores",
    "clipped",
    """
CLIP = 8.0

def clipped(score, b, h, q_idx, kv_idx):
    score = score.clamp(-CLIP, CLIP)
    return CLIP * (score / CLIP).tanh()
""",
)
mask(
    "packed images",
    "packed_vision_mask(grid_thw)",
    """
import torch

grid_thw = [(1, 4, 4), (2, 2, 4), (1, 4, 8)]

def packed_vision_mask(grid):
    sizes = [t * h * w for t, h, w in grid]
    ids = torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(sizes)])
    frames = torch.cat([torch.arange(t).repeat_interleave(h * w) for t, h, w in grid])

    def mod(b, h, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) & (frames[q_idx] == frames[kv_idx])

    return mod
""",
)
mask(
    "audio in chunks",
    "chunked_streaming",
    """
import torch

CHUNK_MS, FRAME_MS, LEFT_CHUNKS, LOOKAHEAD = 160, 20, 2, 1
CHUNK = CHUNK_MS // FRAME_MS
frame_lengths = torch.tensor([61, 40], dtype=torch.int32)

def chunked_streaming(b, h, q, kv):
    qc = torch.div(q, CHUNK, rounding_mode="floor")
    kc = torch.div(kv, CHUNK, rounding_mode="floor")
    near = (kc <= qc + LOOKAHEAD) & (kc >= qc - LEFT_CHUNKS)
    return near & (kv < frame_lengths[b])
""",
)
score(
    "decay by time",
    "TimeDecay.from_config(CONFIG)",
    """
import torch

CONFIG = {"half_life": 24.0, "floor": -4.0}
torch.manual_seed(6)
timestamps = torch.rand(2, 64).cumsum(-1)

class TimeDecay:
    def __init__(self, half_life, floor=-10.0):
        self.rate, self.floor = 0.6931 / half_life, floor

    @classmethod
    def from_config(cls, config):
        return cls(**config)

    def __call__(self, score, b, h, q_idx, kv_idx):
        delta = (timestamps[b, q_idx] - timestamps[b, kv_idx]).abs()
        return score + torch.maximum(-self.rate * delta, torch.tensor(self.floor))
""",
)
both(
    "alternating heads",
    "temperature",
    "by_head",
    """
import torch

HEADS = 4
local_heads = torch.tensor([True, False] * (HEADS // 2))
temps = torch.linspace(0.5, 2.0, HEADS)

def temperature(score, b, h, q_idx, kv_idx):
    return score / temps[h]

def by_head(b, h, q_idx, kv_idx):
    causal = q_idx >= kv_idx
    return torch.where(local_heads[h], causal & (q_idx - kv_idx < 8), causal)
""",
)
mask(
    "chunked attention of Llama 4",
    "chunked_overlay(16)",
    FLEX.format("and_masks")
    + """
def causal_mask_function(batch_idx, head_idx, q_idx, kv_idx):
    return kv_idx <= q_idx

def chunked_overlay(chunk_size: int):
    def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
        return kv_idx // chunk_size == q_idx // chunk_size
    return and_masks(inner_mask, causal_mask_function)
""",
)
score(
    "temperature of long positions",
    "scaled_by_position",
    """
import torch

FLOOR, SCALE = 8, 0.1

def scaled_by_position(score, b, h, q_idx, kv_idx):
    temp = torch.log(torch.floor((q_idx.float() + 1.0) / FLOOR) + 1.0) * SCALE + 1.0
    return score * temp
""",
)
score(
    "padding as a number",
    "padding_bias",
    """
import torch

torch.manual_seed(8)
attention_mask = (torch.rand(2, 64) > 0.2).long()

def padding_bias(score, b, h, q_idx, kv_idx):
    allowed = attention_mask[b, kv_idx].bool() & (q_idx >= kv_idx)
    return torch.where(allowed, score, torch.finfo(score.dtype).min)
""",
)
score(
    "sandwich",
    "sandwich",
    """
import torch

D = 8

def sandwich(score, b, h, q_idx, kv_idx):
    distance = (q_idx - kv_idx).float()
    bias = sum(torch.cos(distance / 10000 ** (2 * i / D)) for i in range(1, D // 2 + 1))
    return score + bias * (h + 1) * 8 / 4
""",
)


# --- refused ------------------------


def refuse(
    name: str, asked: dict[str, str], line: int, words: str, reason: str, source: str
) -> None:
    REFUSED[name] = (asked, line, words, reason, source)


refuse(
    "stick-breaking",
    {"score_mod": "stick_breaking"},
    6,
    "is a reduction",
    "the weight of a key needs a sum over all keys between, so it is no function of one pair",
    """
import torch

def stick_breaking(score, b, h, q_idx, kv_idx):
    log_beta = torch.nn.functional.logsigmoid(score)
    rest = torch.cumsum(torch.nn.functional.logsigmoid(-score), dim=-1)
    return log_beta + rest
""",
)
refuse(
    "dropout of scores",
    {"score_mod": "with_dropout"},
    5,
    "is random",
    "randomness: draw the numbers beforehand",
    """
import torch.nn.functional as F

def with_dropout(score, b, h, q_idx, kv_idx):
    return F.dropout(score, p=0.1, training=True)
""",
)
refuse(
    "top-k of scores",
    {"score_mod": "topk_only"},
    5,
    "is a reduction",
    "the rank of a score in its row is no function of one pair",
    """
import torch

def topk_only(score, b, h, q_idx, kv_idx):
    threshold = score.topk(8).values[-1]
    return torch.where(score >= threshold, score, -float("inf"))
""",
)
refuse(
    "a branch on the pair",
    {"mask_mod": "by_branch"},
    3,
    "a branch depends on the pair",
    "`if` may depend only on numbers of the source: use `torch.where` for the pair",
    """
def by_branch(b, h, q_idx, kv_idx):
    if kv_idx < 4:
        return True
    return q_idx >= kv_idx
""",
)
refuse(
    "features of the pair",
    {"score_mod": "content_bias"},
    8,
    "is a reduction",
    "a product over a feature dimension: append the features to queries and keys, in `head_dim`",
    """
import torch

rel = torch.randn(127, 16)
query = torch.randn(2, 4, 64, 16)

def content_bias(score, b, h, q_idx, kv_idx):
    return score + torch.dot(query[b, h, q_idx], rel[q_idx - kv_idx + 63])
""",
)

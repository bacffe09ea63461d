"""Mods and masks as people write them for FlexAttention.

Tests import them, and run them as the oracle. B is 2, HQ is 4, SQ and SK are 64.
"""

import functools
import math
import operator
from functools import partial
from math import floor, inf

import torch
import torch.nn.functional as F
from torch import Tensor, where
from torch.nn.attention.flex_attention import and_masks, or_masks

HEADS = 4
LENGTH = 64
WINDOW: int = 12
CAP = 20.0
SIDE = 8
TABLE_SIZES = {"small": 8, "large": 16}

slopes = 2.0 ** (-8.0 * torch.arange(1, HEADS + 1) / HEADS)
bias_by_row = torch.linspace(-1, 1, HEADS * LENGTH).reshape(HEADS, LENGTH)
pair_bias = torch.randn(LENGTH, LENGTH)
full_bias = torch.randn(2, HEADS, LENGTH, LENGTH)
documents = torch.tensor([0] * 20 + [1] * 30 + [2] * 14, dtype=torch.int32)
lengths = torch.tensor([40, 64], dtype=torch.int32)
padding = torch.arange(LENGTH).reshape(1, LENGTH) < torch.tensor([[50], [64]])
distance_table = torch.randn(HEADS, 32)
gate = torch.nn.Parameter(torch.randn(HEADS))
order = torch.randperm(LENGTH)
token_types = torch.randint(0, 2, (2, LENGTH))
left = torch.tensor([0, 5])
documents_by_batch: Tensor = torch.stack([documents, documents.flip(0)])
_private_scale = torch.full((HEADS,), 0.25)


# --- masks ------------------------


def causal(b, h, q_idx, kv_idx):
    """Keep keys up to the query."""
    return q_idx >= kv_idx


def anticausal(batch, head, row, column):
    return row <= column


def everything(b, h, q_idx, kv_idx):
    return q_idx == q_idx


def window(size=WINDOW):
    def near(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < size

    return and_masks(causal, near)


def both_sides(size, *, strict=False):
    if strict:
        return lambda b, h, q, k: torch.abs(q - k) < size
    return lambda b, h, q, k: (q - k).abs() <= size


def prefix(length):
    return or_masks(causal, lambda b, h, q_idx, kv_idx: kv_idx < length)


def dilated(size, step):
    def mask(b, h, q_idx, kv_idx):
        gap = (q_idx - kv_idx).abs()
        return (gap <= size) & (gap % step == 0)

    mask.__name__ = f"dilated_{size}_{step}"
    return mask


def document(inner, doc):
    def within(b, h, q_idx, kv_idx):
        same = doc[q_idx] == doc[kv_idx]
        return same & inner(b, h, q_idx, kv_idx)

    return within


def document_local(inner, ids: Tensor, starts: Tensor):
    def within(b, h, q, k):
        first = starts[ids[q]]
        same = ids[q] == ids[k]
        return torch.logical_and(same, inner(b, h, q - first, k - first))

    return within


def padded(b, h, q_idx, kv_idx):
    return padding[b, kv_idx]


def padded_both(b, h, q_idx, kv_idx):
    return padding[b][kv_idx] & padding[b][q_idx]


def by_length(b, h, q_idx, kv_idx):
    in_batch = kv_idx < lengths[b]
    return in_batch & causal(b, h, q_idx, kv_idx)


def position(index, width=SIDE):
    return index // width, index % width


def neighbourhood(radius):
    def mask(b, h, q_idx, kv_idx):
        (q_y, q_x), (k_y, k_x) = position(q_idx), position(kv_idx)
        middle_y = q_y.clamp(radius, SIDE - 1 - radius)
        middle_x = torch.clamp(q_x, min=radius, max=SIDE - 1 - radius)
        return ((middle_y - k_y).abs() <= radius) & (torch.abs(middle_x - k_x) <= radius)

    return mask


def tiled(tile):
    per_row = SIDE // tile

    def place(index):
        number, inside = index // (tile * tile), index % (tile * tile)
        return (number // per_row) * tile + inside // tile, (
            number % per_row
        ) * tile + inside % tile

    def mask(b, h, q_idx, kv_idx):
        a, c = place(q_idx), place(kv_idx)
        return (abs(a[0] - c[0]) <= 2) & (abs(a[1] - c[1]) <= 2)

    return mask


def sliding_tiles(canvas, kernel, tile):
    rows, columns = canvas[0] // tile[0], canvas[1] // tile[1]
    assert canvas[0] % tile[0] == 0, f"{canvas} is not made of {tile}"
    reach_y, reach_x = kernel[0] // tile[0] // 2, kernel[1] // tile[1] // 2

    def mask(b, h, q_idx, kv_idx):
        size = tile[0] * tile[1]
        q_tile, k_tile = q_idx // size, kv_idx // size
        y = (q_tile // columns).clamp(reach_y, rows - 1 - reach_y)
        x = (q_tile % columns).clamp(reach_x, columns - 1 - reach_x)
        down = (k_tile // columns >= y - reach_y) & (k_tile // columns <= y + reach_y)
        across = (k_tile % columns >= x - reach_x) & (k_tile % columns <= x + reach_x)
        return down & across

    return mask


def chunked(size):
    return lambda b, h, q, k: (q // size == k // size) & (q >= k)


def chunked_padded(size, padding_left):
    def overlay(batch_idx, head_idx, q_idx, kv_idx):
        q_chunk = (q_idx - padding_left[batch_idx]) // size
        return (kv_idx - padding_left[batch_idx]) // size == q_chunk

    return overlay


def batched(inner, size):
    def mask(b, h, q, kv):
        return (q // size == kv // size) & inner(b, h, q % size, kv % size)

    return mask


def shifted(inner, q_offset, kv_offset):
    def mask(b, h, q_idx, kv_idx):
        return inner(b, h, q_idx + q_offset, kv_idx + kv_offset)

    return mask


def block_diffusion(size):
    """Mask of block diffusion, with a noisy and a clean half."""
    half = LENGTH // 2

    def mask(b, h, q_idx, kv_idx):
        q_clean, k_clean = q_idx >= half, kv_idx >= half
        q_block = torch.where(q_clean, (q_idx - half) // size, q_idx // size)
        k_block = torch.where(k_clean, (kv_idx - half) // size, kv_idx // size)
        diagonal = (q_block == k_block) & (q_clean == k_clean)
        offset = (q_block > k_block) & k_clean & ~q_clean
        return diagonal | offset | ((q_block >= k_block) & k_clean & q_clean)

    return mask


def swin(size):
    def mask(b, h, q_idx, kv_idx):
        q_last, k_last = q_idx >= LENGTH - size, kv_idx >= LENGTH - size
        return (q_last != k_last) ^ (q_idx // size == kv_idx // size)

    return mask


def sink_and_window(b, h, q_idx, kv_idx):
    return causal(b, h, q_idx, kv_idx) & ((kv_idx < 4) | (q_idx - kv_idx < WINDOW))


def alternating(b, h, q_idx, kv_idx):
    local = (q_idx - kv_idx).abs() <= WINDOW
    return torch.where(h % 2 == 0, local, torch.full_like(local, True, dtype=torch.bool))


def all_of(*masks):
    """Join masks as transformers does."""
    if not all(callable(mask) for mask in masks):
        raise RuntimeError(f"{masks} are to be functions")

    def joined(b, h, q_idx, kv_idx):
        result = q_idx.new_ones((), dtype=torch.bool)
        for mask in masks:
            result = result & mask(b, h, q_idx, kv_idx).to(result.device)
        return result

    return joined


def any_of(*masks):
    def joined(b, h, q_idx, kv_idx):
        result = b.new_zeros((), dtype=torch.bool)
        for mask in masks:
            result = result | mask(b, h, q_idx, kv_idx)
        return result

    return joined


def folded(*masks):
    def joined(*pair):
        return functools.reduce(operator.and_, [mask(*pair) for mask in masks])

    return joined


def image_tokens(b, h, q_idx, kv_idx):
    both = (token_types[b, q_idx] == 1) & (token_types[b, kv_idx] == 1)
    return causal(b, h, q_idx, kv_idx) | both


def permuted(b, h, q_idx, kv_idx):
    return order[q_idx] >= order[kv_idx]


def by_batch(b, h, q_idx, kv_idx):
    return documents_by_batch[b, q_idx] == documents_by_batch[b, kv_idx]


def video(prompt=4, frame=10, width=2, *, sink=False, step=4):
    def rounded(n):
        return floor(n / step) * step

    def mask(b, h, q_idx, kv_idx):
        column = kv_idx < (prompt + frame if sink else prompt)
        reach = rounded(width * frame)
        return column | (q_idx < prompt) | (torch.abs(q_idx - kv_idx) < reach)

    return mask


def counted(b, h, q_idx, kv_idx):
    kept = 0
    for gap in range(0, 20, 5):
        kept = kept + (q_idx - kv_idx == gap)
    return kept > 0


def negated(inner):
    return lambda *pair: ~inner(*pair)


# --- scores ------------------------


def identity(score, b, h, q_idx, kv_idx):
    return score


def alibi(heads):
    def mod(score, b, h, q_idx, kv_idx):
        slope = torch.exp2(-((h + 1) * 8.0 / heads))
        return score + (kv_idx - q_idx) * slope

    return mod


def alibi_table(score, b, h, q, k):
    return score + slopes[h] * (k - q)


def soft_cap(cap: float = CAP):
    tanh = torch.tanh if cap else None

    def mod(score, b, h, q_idx, kv_idx):
        return cap * tanh(score / cap)

    return mod


def soft_cap_steps(score, b, h, q_idx, kv_idx):
    score = score / CAP
    score = torch.tanh(score)
    score *= CAP
    return score


def causal_score(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, score, -float("inf"))


def causal_math(score, b, h, q_idx, kv_idx):
    return where(q_idx >= kv_idx, score, -math.inf)


def causal_torch(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, score, torch.full_like(score, -torch.inf))


def causal_filled(score, b, h, q_idx, kv_idx):
    return score.masked_fill(kv_idx > q_idx, -inf)


def causal_factor(score, b, h, q_idx, kv_idx):
    return score + (q_idx < kv_idx).float() * torch.finfo(torch.float32).min


def causal_half(score, b, h, q_idx, kv_idx):
    return score + torch.where(q_idx < kv_idx, 1, 0) * torch.finfo(torch.float16).min


def causal_finfo(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, score, torch.finfo(torch.float32).min)


def relative(score, b, h, q_idx, kv_idx):
    return score + (q_idx - kv_idx)


def squared(score, b, h, m, n):
    return score * score


def cubed(score, b, h, m, n):
    return (score**3 + score.pow(2)) * 2**-2


def trigonometric(score, b, h, m, n):
    return torch.sin(torch.cos(score)) + torch.tan(b)


def checkerboard(score, batch, head, q, k):
    score = torch.where(torch.abs(k - q) % 2 == 1, score * 0.5, score)
    return torch.where(torch.abs(k - q) % 2 == 0, score * 2.0, score)


def row_bias(score, b, h, q_idx, kv_idx):
    return score + bias_by_row[h, kv_idx]


def bias_of_pairs(score, b, h, q_idx, kv_idx):
    return score + pair_bias[q_idx, kv_idx]


def bias_of_all(score, b, h, q_idx, kv_idx):
    return score + full_bias[b, h, q_idx, kv_idx]


def bias_flipped(score, b, h, q_idx, kv_idx):
    return score + pair_bias[kv_idx, q_idx]


def bias_by_distance(score, b, h, q_idx, kv_idx):
    return score + distance_table[h, (q_idx - kv_idx).abs().clamp(max=31)]


def bias_clipped(score, b, h, q_idx, kv_idx):
    return score + distance_table[h, torch.clip(q_idx - kv_idx, -16, 15) + 16]


def gated(score, b, h, q_idx, kv_idx):
    return score * torch.sigmoid(gate[h])


def private(score, b, h, q_idx, kv_idx):
    return score * _private_scale[h].float()


def silu_score(score, b, h, q_idx, kv_idx):
    return F.silu(score) + F.relu(score) + torch.nn.functional.leaky_relu(score, 0.1)


def gelu_score(score, b, h, q_idx, kv_idx):
    return F.gelu(score, approximate="tanh")


def logarithmic(score, b, h, q_idx, kv_idx):
    return score * torch.log(1 + q_idx.float()) / math.log(LENGTH) - torch.log2(kv_idx + 1.0)


def log_distance(score, b, h, q_idx, kv_idx):
    gap = torch.maximum(q_idx - kv_idx, torch.zeros_like(q_idx))
    return score - slopes[h] * torch.log1p(gap.to(score.dtype))


def rounded_score(score, b, h, q_idx, kv_idx):
    return (
        torch.floor(score)
        + torch.ceil(score) * 0.5
        + torch.round(score) * 0.25
        + torch.trunc(score)
    )


def signed(score, b, h, q_idx, kv_idx):
    return torch.sign(score) * score.abs().sqrt() + torch.minimum(score, -score).square()


def masked_by_number(score, b, h, q_idx, kv_idx):
    return score * (q_idx >= kv_idx) + (kv_idx == 0)


def composed(*mods):
    def mod(score, b, h, q_idx, kv_idx):
        for each in mods:
            score = each(score, b, h, q_idx, kv_idx)
        return score

    return mod


def temperature(score, b, h, q_idx, kv_idx, *, scale):
    return score * scale


def yarn(factor, low=0.5):
    scale = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return lambda s, b, h, q, k: s * max(scale, low)


def chosen(kind):
    size = TABLE_SIZES[kind]
    names = ["far", "near"]

    def mod(score, b, h, q_idx, kv_idx):
        match = [score - 1.0, score + 1.0][names.index("near") if False else 1]
        return torch.where((q_idx - kv_idx).abs() < size, match, score)

    return mod


def soft_positive(score, b, h, q_idx, kv_idx):
    return F.softplus(score) + F.logsigmoid(score) + F.elu(score)


def lerped(score, b, h, q_idx, kv_idx):
    weight = 1 / (1 + torch.exp(-(q_idx - kv_idx) / 8))
    return torch.lerp(score, score.new_zeros(()), weight)


def integers(score, b, h, q_idx, kv_idx):
    step = torch.div(q_idx - kv_idx, 3, rounding_mode="floor")
    cut = torch.div(q_idx - kv_idx, 3, rounding_mode="trunc")
    return score + torch.remainder(step, 5) + cut + q_idx.to(torch.int32) % 7


class Settings:
    """Object with the attributes that a live function may capture."""

    def __init__(self, size):
        self.size = size
        self.bias = torch.randn(HEADS)

    def mask(self, b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() <= self.size

    def score(self):
        def mod(score, b, h, q_idx, kv_idx):
            return score + self.bias[h]

        return mod


half_score = partial(temperature, scale=0.5)


# --- bits and whole numbers ------------------------


def spread(x):
    """Insert a zero after each bit of a small number."""
    x = (x | (x << 4)) & 0x0F0F
    x = (x | (x << 2)) & 0x3333
    return (x | (x << 1)) & 0x5555


def gathered(code):
    code = code & 0x5555
    code = (code | (code >> 1)) & 0x3333
    return (code | (code >> 2)) & 0x0F0F


def morton(radius):
    def mask(b, h, q_idx, kv_idx):
        near_x = (gathered(q_idx) - gathered(kv_idx)).abs() <= radius
        return near_x & ((gathered(q_idx >> 1) - gathered(kv_idx >> 1)).abs() <= radius)

    return mask


bitmap = torch.randint(0, 2**31 - 1, (LENGTH, 2), dtype=torch.int32)


def packed(b, h, q_idx, kv_idx):
    return (bitmap[q_idx, kv_idx // 32] >> (kv_idx % 32)) & 1 == 1


def hashed(seed):
    def mask(b, h, q_idx, kv_idx):
        x = (q_idx * 73 ^ kv_idx * 19) + seed
        return ((x ^ (x >> 3)) & 7) != 0

    return mask


def strided(b, h, q_idx, kv_idx):
    return (kv_idx < (1 << h)) | ((q_idx ^ kv_idx) & ~3 == 0)


def interleaved(b, h, q_idx, kv_idx):
    return spread(q_idx % 8) >= spread(kv_idx % 8)


def t5(buckets, furthest, *, bidirectional=False):
    table = torch.randn(16, HEADS, dtype=torch.float32)

    def bucket(distance):
        count, start = buckets, 0
        if bidirectional:
            count //= 2
            start = (distance > 0).to(torch.long) * count
            distance = torch.abs(distance)
        else:
            distance = -torch.min(distance, torch.zeros_like(distance))
        exact = count // 2
        far = exact + (
            torch.log(distance.clamp(min=1).double() / exact)
            / math.log(furthest / exact)
            * (count - exact)
        ).to(torch.long)
        far = torch.minimum(far, torch.full_like(far, count - 1))
        return start + torch.where(distance < exact, distance, far)

    def mod(score, b, h, q_idx, kv_idx):
        return score + table[bucket(kv_idx - q_idx), h]

    return mod


def interpolated(score, b, h, q_idx, kv_idx):
    at = (q_idx - kv_idx).abs() * 0.45
    low = torch.floor(at).int()
    return score + torch.lerp(distance_table[h, low], distance_table[h, low + 1], at - low)


def exact_gelu(score, b, h, q_idx, kv_idx):
    return F.gelu(score) + torch.erf(score / 3) + torch.expm1(-score.abs())


# --- as in the tests of FlexAttention, and in transformers ------------------------

stacked_bias = torch.randn(4, 2, HEADS, LENGTH)
stacked_heads = torch.randn(2, HEADS, 4, LENGTH)
which = torch.tensor(1)
addend = torch.ones((), dtype=torch.int32)
batch_scale = torch.randn(2)
key_scale = torch.randn(LENGTH)
first_half = torch.zeros(LENGTH, dtype=torch.bool)
first_half[: LENGTH // 2] = True
prefix_by_batch = torch.tensor([7, 20], dtype=torch.int32)
offsets_of_documents = torch.tensor([0, 20, 50, LENGTH], dtype=torch.int32)
shifts = torch.tensor([1, 0])
lower = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
relative_table = torch.randn(2 * LENGTH)
ADDS = True


def chained_indices(score, b, h, q_idx, kv_idx):
    return score + stacked_bias[0][b, h][q_idx] * batch_scale[b]


def index_of_a_tensor(score, b, h, q_idx, kv_idx):
    return score + stacked_heads[b][h][which, q_idx] + stacked_heads[b, h, 0, q_idx]


def captured_number(score, b, h, q_idx, kv_idx):
    if ADDS:
        return score + addend
    return score * addend


def even_keys(score, b, h, q, kv):
    return torch.where(kv % 2 == 0, score, float("-inf"))


def all_dimensions(score, batch, head, token_q, token_kv):
    score = score + key_scale[token_kv]
    score = score + batch_scale[batch]
    score = score + slopes[head]
    return score


def halves(score, b, h, q, kv):
    return torch.where(first_half[q] == first_half[kv], score, float("-inf"))


def cross(score, b, h, q, kv):
    def place(index):
        return index / SIDE, index % SIDE

    (q_x, q_y), (kv_x, kv_y) = place(q), place(kv)
    near = ((q_x - kv_x).abs() <= 3) | ((q_y - kv_y).abs() <= 3)
    return torch.where(near, score, float("-inf"))


def quotient(score, b, h, q, kv):
    return score - q // (1 + kv)


def bidirectional_part(score, b, h, q, kv):
    length = prefix_by_batch[b]
    inside = (q <= length) & (kv <= length)
    return torch.where(inside | (q >= kv), score, -float("inf"))


def nested(inner, offsets, ids):
    def mod(qk, b, h, q, kv):
        return inner(qk, b, h, q - offsets[ids[q]], kv - offsets[ids[kv]])

    return mod


def capped_by_length(inner):
    def mod(qk, b, h, q, kv):
        return torch.where(qk <= lengths[b], inner(qk, b, h, q, kv), -float("inf"))

    return mod


def of_first_head(b, h, q_idx, kv_idx):
    zero = h.new_zeros(h.shape)
    return lower[b, zero, q_idx, kv_idx]


def added_mask(score, b, h, q_idx, kv_idx):
    return score + lower[b, h.new_zeros(h.shape), q_idx, kv_idx]


def by_difference(score, b, h, q, kv):
    return score + relative_table[(q - kv) + LENGTH]


def symmetric(score, b, h, q, kv):
    return score + key_scale[q] + key_scale[kv] * key_scale[torch.minimum(q, kv)]


def indirect(score, b, h, q, kv):
    return score + key_scale[order[q]]


def two_sines(score, b, h, m, n):
    cosine, sine = torch.cos(score), torch.sin(score)
    return cosine * sine + torch.tan(b)


def shifted_by_batch(b, h, q, kv):
    return q + (shifts[b] * 16) >= kv


def blockwise(block_sequence_ids):
    def inner_mask(batch_idx: int, head_idx: int, q_idx: int, kv_idx: int) -> bool:
        q_group = block_sequence_ids[batch_idx, q_idx]
        kv_group = block_sequence_ids[batch_idx, kv_idx]
        return (q_group == kv_group) & (q_group >= 0)

    return inner_mask


def padding_mask_function(padding_mask: torch.Tensor):
    def inner_mask(batch_idx, head_idx, q_idx, kv_idx) -> bool:
        return padding_mask[batch_idx, kv_idx]

    return inner_mask


def always(batch_idx: int, head_idx: int, q_idx: int, kv_idx: int) -> bool:
    return q_idx >= 0


def paged(inner, table, size):
    def mask(b, h, q_idx, physical):
        logical = table[b, physical // size]
        index = logical * size + physical % size
        return torch.where(logical >= 0, inner(b, h, q_idx, index), False)

    return mask


packed_bytes = torch.arange(LENGTH * 8).reshape(LENGTH, 8).mul(37).remainder(256).to(torch.uint8)


def packed_by_eight(b, h, q_idx, kv_idx):
    return ((packed_bytes[q_idx, kv_idx // 8] >> (kv_idx % 8)) & 1) == 1


def powers(score, b, h, q_idx, kv_idx):
    return (
        torch.sign(score) * torch.pow(abs(score) + 0.5, 1.5)
        + torch.round(score * 4) / 4
        + 2.0 ** -abs(score)
    )


def rounded_index(score, b, h, q_idx, kv_idx):
    return (
        score + bias_by_row[h, torch.floor(kv_idx / 2).to(torch.int32)] + bias_by_row[h, round(3.4)]
    )


table_of_masks = []
for _width in (9, 20):
    table_of_masks.append(lambda b, h, q, k, width=_width: q - k < width)
table_of_masks.insert(0, lambda b, h, q, k: q >= k)
named = {}
named["reach"] = 3
named.update(gain=2.0)


def by_name(score, b, h, q_idx, kv_idx):
    return torch.where(
        q_idx - kv_idx < named["reach"], score * named["gain"], score + defined_later[h]
    )


defined_later = torch.linspace(-1, 1, HEADS)


def by_dtype(table):
    if table.dtype == torch.bool:
        return lambda b, h, q, k: table[b, k]
    if table.dtype in (torch.int32, torch.long):
        return lambda b, h, q, k: table[b] > k
    raise ValueError("a table of another dtype")


class Reach:
    def __init__(self, reach):
        self.reach = reach

    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() < self.reach


class Biased(torch.nn.Module):
    """Module with a learned parameter, a frozen parameter, and buffers."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(HEADS))
        self.frozen = torch.nn.Parameter(torch.randn(HEADS), requires_grad=False)
        self.register_buffer("steps", torch.randn(LENGTH))
        self.register_buffer("ends", torch.full((2,), 50, dtype=torch.int32))

    def score(self, score, b, h, q_idx, kv_idx):
        return score * self.frozen[h] + self.bias[h] + self.steps[kv_idx]

    def mask(self, b, h, q_idx, kv_idx):
        return kv_idx < self.ends[b]


rate = torch.nn.Parameter(torch.tensor(0.5))
offset = torch.full((), 0.25, requires_grad=True)
sharpness = torch.tensor(1.5)
sharpness.requires_grad_()
floor_of = torch.tensor(-2.0)
floor_of.requires_grad = True
constant = torch.tensor(3.0)


def by_learned_numbers(score, b, h, q_idx, kv_idx):
    return torch.maximum(score * rate + offset.exp() * constant, floor_of) * sharpness


def by_numbers_of_a_factory():
    learned = torch.nn.Parameter(torch.ones([]))

    def mod(score, b, h, q_idx, kv_idx):
        return torch.where(kv_idx < 9, learned, rate) * score

    return mod


def straight_through(score, b, h, q_idx, kv_idx):
    x = score * rate + gate[h]
    return x + (x.round() - x).detach() + gate.data[h] * rate.detach()


@torch.no_grad()
def stopped(score, h):
    return score * gate[h]


def without_gradient(score, b, h, q_idx, kv_idx):
    assert CAP > 0
    assert h.dim() == 0, "no head"
    assert "gate" in globals()
    with torch.no_grad():
        bounded = torch.tanh(score * rate)
    return bounded + stopped(score, h) + score * gate[h]


shared = torch.tensor(0.75)
group = [shared]
group[0].requires_grad_()


@torch.no_grad()
def unchanged(x):
    return x


def by_modes_of_gradients(score, b, h, q_idx, kv_idx):
    with torch.no_grad():
        kept = score
        element = gate[h]
        held = score * shared
        with torch.enable_grad():
            learned = score * rate
        with torch.set_grad_enabled(False):
            held = held + score.to(torch.float64).to(score.dtype)
    return unchanged(kept) * kept + element * held + learned * shared


def arctangent(score, b, h, q_idx, kv_idx):
    return score + torch.atan2(score, (q_idx - kv_idx) + 0.5)


def log_of_sums(score, b, h, q_idx, kv_idx):
    return torch.logaddexp(score, 0.1 * (kv_idx - q_idx)) + torch.asinh(score)


spans = torch.tensor([[[0, 9], [20, 40]], [[5, 30], [33, 60]]])


def in_spans(b, h, q_idx, kv_idx):
    kept = q_idx == kv_idx
    for start, stop in spans[b]:
        kept = kept | ((q_idx >= start) & (kv_idx >= start) & (kv_idx < stop))
    return kept

"""Serve requests of a random transformer with windows, sinks and a cache in FP8.

    kgen render serve_window_fp8
    python examples/serving_engine.py

On a machine without a GPU, TRITON_INTERPRET=1 runs the script on the CPU. A step of the engine has
room for a fixed number of tokens: one token of each request that decodes, then chunks of prompts.
On a GPU, one CUDA graph runs all steps. The cache has a scale for each token and head. A model in
plain PyTorch, without a cache, also chooses tokens. The script prints how many are the same.
"""

import argparse
import random
import sys

import torch

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--generated", default="generated", help="output folder of `kgen render`")
parser.add_argument("--prompts", type=int, nargs="+", default=[5, 130, 40, 64, 9, 200])
parser.add_argument("--new", type=int, default=12, help="tokens to generate for each prompt")
parser.add_argument("--budget", type=int, default=64, help="tokens of a step")
parser.add_argument("--sequences", type=int, default=4, help="requests of a step")
parser.add_argument("--pages", type=int, default=40, help="pages of the cache")
options = parser.parse_args()
sys.path.insert(0, options.generated)

import serve_window_fp8 as kernels  # noqa: E402

PAGE, HEAD, HEADS, KV_HEADS, WIDTH, WORDS, LONGEST = 16, 64, 4, 2, 128, 64, 512
WINDOWS = (24, 2**20)  # a layer with a window, and a layer without
FP8, LARGEST = torch.float8_e4m3fn, 448.0
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Layer:
    """Random weights of attention."""

    def __init__(self, window, draw):
        self.window = window
        self.q, self.k, self.v = (draw(WIDTH, n * HEAD) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.out, self.sinks = 4 * draw(HEADS * HEAD, WIDTH), 2 + draw(1, HEADS)[0]

    def heads(self, x):
        """Return queries, keys and values of tokens [T, WIDTH], each [T, heads, HEAD]."""
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return [(x @ w).view(len(x), -1, HEAD).bfloat16() for w in (2 * self.q, self.k, self.v)]


class Model:
    """Embeddings, layers, and the output matrix."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)

        def draw(rows, columns):
            return (torch.randn((rows, columns), generator=generator) * rows**-0.5).to(device)

        self.words = draw(WORDS, WIDTH) * WORDS**0.5
        self.places = draw(LONGEST, WIDTH) * LONGEST**0.5
        self.layers = [Layer(window, draw) for window in WINDOWS]
        self.head = draw(WIDTH, WORDS)

    def run(self, tokens, places, attend):
        """Return the next token after each token. `attend(number, layer, q, k, v)` is attention."""
        x = self.words[tokens] + self.places[places]
        for number, layer in enumerate(self.layers):
            x = x + attend(number, layer, *layer.heads(x)).float().flatten(1) @ layer.out
        return (x @ self.head).argmax(-1)


def plain(layer, q, k, v):
    """Return attention of one sequence in plain PyTorch, over keys and values rounded to FP8."""
    k, v = map(rounded, (k, v))
    group = HEADS // KV_HEADS
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.float().transpose(0, 1) @ k.transpose(1, 2) * HEAD**-0.5
    at = torch.arange(len(q), device=device)
    back = at[:, None] - at
    scores = scores.masked_fill((back < 0) | (back >= layer.window), float("-inf"))
    sinks = layer.sinks[:, None, None].expand(-1, len(q), 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return (weights @ v).transpose(0, 1).bfloat16()


def rounded(x):
    """Round keys or values [T, heads, HEAD] to FP8 with a scale for each token and head."""
    scale = x.float().abs().amax(-1, keepdim=True) / LARGEST
    return (x.float() / scale).to(FP8).float() * scale


class Cache:
    """Pages of one layer, with their scales."""

    def __init__(self, pages):
        shape = (pages, PAGE, KV_HEADS)
        self.pages = [torch.zeros((*shape, HEAD), device=device).to(FP8) for _ in "kv"]
        self.scales = dict.fromkeys(("k_scale", "v_scale"))
        for name in self.scales:
            self.scales[name] = torch.ones(shape, device=device)


class Engine:
    """Continuous batching over a paged cache."""

    def __init__(self, model, pages, sequences, budget):
        self.model, self.budget, self.sequences = model, budget, sequences
        self.caches = [Cache(pages) for _ in model.layers]
        self.free = list(range(pages))
        random.Random(0).shuffle(self.free)
        ints = {"dtype": torch.int32, "device": device}
        self.tokens, self.places = (torch.zeros(budget, **ints) for _ in range(2))
        self.slots = torch.full((budget,), -1, **ints)
        self.table = torch.zeros((sequences, LONGEST // PAGE), **ints)
        self.lens, self.starts = torch.zeros(sequences, **ints), torch.zeros(sequences + 1, **ints)
        self.chosen = torch.zeros(budget, dtype=torch.int64, device=device)
        self.out = torch.zeros((budget, HEADS, HEAD), dtype=torch.bfloat16, device=device)
        size = kernels.serve_window_fp8_serve_workspace(
            budget, sequences, HEADS, KV_HEADS, device=device
        )
        self.workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        self.graph = None

    def generate(self, prompts, new):
        """Return the new tokens of each prompt."""
        waiting = [Request(tokens, new) for tokens in prompts]
        running, everyone = [], list(waiting)
        while waiting or running:
            while waiting and len(running) < self.sequences:
                if waiting[0].pages_needed > len(self.free):
                    break
                request = waiting.pop(0)
                request.pages = [self.free.pop() for _ in range(request.pages_needed)]
                running.append(request)
            assert running, "a request needs more pages than the cache has"
            self.step(running)
            for request in [r for r in running if r.finished]:
                running.remove(request)
                self.free += request.pages
        return [request.tokens[len(request.prompt) :] for request in everyone]

    def step(self, running):
        """Run one step. Chunks of prompts take the room that decoding requests leave."""
        counts, room = {}, self.budget
        for request in sorted(running, key=lambda r: r.left > 1):
            counts[request] = min(request.left, room)
            room -= counts[request]
        self.fill(running, [counts[request] for request in running])
        self.run()
        chosen, end = self.chosen.tolist(), 0
        for request in running:
            end += counts[request]
            request.done += counts[request]
            if counts[request] and not request.left:
                request.tokens.append(chosen[end - 1])

    def fill(self, running, counts):
        """Write the tokens of a step into the tensors of the graph. Unused rows have no slot."""
        rows, lens, starts = [], [0] * self.sequences, [0] * (self.sequences + 1)
        for number, (request, count) in enumerate(zip(running, counts, strict=True)):
            for place in range(request.done, request.done + count):
                slot = request.pages[place // PAGE] * PAGE + place % PAGE
                rows.append((request.tokens[place], place, slot))
            lens[number] = request.done + count
            starts[number + 1 :] = [len(rows)] * (self.sequences - number)
            pages = torch.tensor(request.pages, dtype=torch.int32)
            self.table[number, : len(pages)] = pages.to(device)
        rows += [(0, 0, -1)] * (self.budget - len(rows))
        columns = zip(*rows, strict=True)
        for tensor, values in zip(
            (self.tokens, self.places, self.slots, self.lens, self.starts),
            (*columns, lens, starts),
            strict=True,
        ):
            tensor.copy_(torch.tensor(values, dtype=torch.int32))

    def run(self):
        """Run the model, on a GPU as a CUDA graph."""
        if device.type == "cpu":
            self.forward()
        elif self.graph is None:
            self.forward()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.forward()
        else:
            self.graph.replay()

    def forward(self):
        """Choose the next token after each token of the step."""
        self.chosen.copy_(self.model.run(self.tokens, self.places, self.attend))

    def attend(self, number, layer, q, k, v):
        """Write keys and values into the cache, and return attention of the queries."""
        cache = self.caches[number]
        kernels.serve_window_fp8_append(
            k, v, *cache.pages, slot_mapping=self.slots, **cache.scales, set_scales=True
        )
        return kernels.serve_window_fp8_serve(
            q,
            *cache.pages,
            block_table=self.table,
            seq_lens=self.lens,
            cu_seqlens_q=self.starts,
            sinks=layer.sinks,
            window=layer.window,
            out=self.out,
            workspace=self.workspace,
            **cache.scales,
        )


class Request:
    """A prompt, the tokens after it, and the pages of its keys."""

    def __init__(self, prompt, new):
        self.prompt, self.tokens, self.done = prompt, list(prompt), 0
        self.length = len(prompt) + new
        self.pages_needed = -(-self.length // PAGE)

    @property
    def left(self):
        """Number of tokens whose keys are not in the cache."""
        return len(self.tokens) - self.done

    @property
    def finished(self):
        return len(self.tokens) == self.length


@torch.no_grad()
def main():
    model, draw = Model(), random.Random(0)
    prompts = [[draw.randrange(WORDS) for _ in range(n)] for n in options.prompts]
    engine = Engine(model, options.pages, options.sequences, options.budget)
    for prompt, found in zip(prompts, engine.generate(prompts, options.new), strict=True):
        tokens = list(prompt)
        for _ in range(options.new):
            at = torch.arange(len(tokens), device=device)
            now = torch.tensor(tokens, device=device)
            tokens.append(int(model.run(now, at, lambda _, *given: plain(*given))[-1]))
        same = sum(a == b for a, b in zip(found, tokens[len(prompt) :], strict=True))
        print(
            f"prompt of {len(prompt)} tokens: {len(found)} new, the same as without a cache: {same}"
        )


main()

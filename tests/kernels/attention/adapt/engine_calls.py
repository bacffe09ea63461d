"""Run batches through an emitted backend of vLLM or SGLang, and print its errors against float64.

`test_engines.py` starts it: engine_calls.py ENGINE FOLDER CASE. The folder has the package, and
perhaps a stand-in for the engine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

HEAD = 32
HQ, HKV, PAGE, PAGES, TOKENS, SEQUENCES = 4, 2, 16, 14, 64, 4
SCALE = 0.3
SLOPES = [0.5, 0.25, 0.1, 0.02]
STEPS = (((0, 37), (1, 5)), ((0, 1), (1, 20), (2, 9)), ((0, 1), (1, 1), (2, 1)))
"""The batches: the sequences and their numbers of new tokens."""
START = "kernel: attention\nname: own\ndtype: bf16\nhead_dim: 32\npasses: [forward, serve]\n"
CAUSAL = "q_idx >= kv_idx"
CASES: dict[str, tuple[str, tuple[dict[str, Any], ...]]] = {
    "plain": (f"gqa: any\nmask_mod: {CAUSAL}\n", ({},)),
    "window": (
        f"gqa: 2\nsinks: true\nmask_mod: {CAUSAL} and q_idx - kv_idx < 12\n",
        ({"window": 12, "sinks": True},),
    ),
    "any": (
        "gqa: any\nsinks: true\nparams: {reach: {type: int, runtime: true}}\n"
        f"mask_mod: {CAUSAL} and q_idx - kv_idx < reach\n",
        ({"window": 12, "sinks": True}, {"sinks": True}),
    ),
    "cap": (f"gqa: any\nscore_mod: 2.0 * tanh(score / 2.0)\nmask_mod: {CAUSAL}\n", ({"cap": 2.0},)),
    "alibi": (
        "gqa: any\nbuffers: {tilt: {shape: [HQ], dtype: fp32}}\n"
        f"score_mod: score + tilt[h] * (kv_idx - q_idx)\nmask_mod: {CAUSAL}\n",
        ({"slopes": True},),
    ),
    "fp8": (
        f"gqa: any\nkv_dtype: fp8_e4m3\ndeterministic: batch\nmask_mod: {CAUSAL}\n",
        ({"scales": 1},),
    ),
    "heads": (f"gqa: any\nkv_dtype: fp8_e4m3\nmask_mod: {CAUSAL}\n", ({"scales": HKV},)),
    "own": (
        f"gqa: any\nmask_mod: {CAUSAL} and (q_idx - kv_idx < 9 or kv_idx < 3)\n"
        "score_mod: score * 1.5\n",
        ({"own": True},),
    ),
}
"""The spec of a case, and its layers."""


class Server:
    """The sequences of one layer, their pages, and the keys and values that they have."""

    def __init__(self, layer: dict[str, Any]) -> None:
        self.layer = layer
        random = torch.Generator().manual_seed(len(layer))
        self.random = random
        order = (torch.randperm(PAGES - 1, generator=random) + 1).tolist()
        self.pages = [order[4 * n : 4 * n + 4] for n in range(3)]
        self.k = [torch.empty(0, HKV, HEAD) for _ in range(3)]
        self.v = [torch.empty(0, HKV, HEAD) for _ in range(3)]
        self.sinks = torch.randn(HQ, generator=random)
        count = layer.get("scales", 0)
        self.scales = (
            [0.02 + 0.02 * torch.rand(count, generator=random) for _ in "kv"] if count else []
        )

    def drawn(self, tokens: int, heads: int) -> Tensor:
        return torch.randn((tokens, heads, HEAD), generator=self.random).bfloat16()

    def step(self, batch: tuple[tuple[int, int], ...], padding: int) -> SimpleNamespace:
        """Return the tensors of a batch. Rows of padding have no slot."""
        total = sum(count for _, count in batch) + padding
        q, k, v = self.drawn(total, HQ), self.drawn(total, HKV), self.drawn(total, HKV)
        slots, starts, lengths = [], [0], []
        for number, count in batch:
            rows = slice(starts[-1], starts[-1] + count)
            done = len(self.k[number])
            self.k[number] = torch.cat([self.k[number], self.stored(k[rows], 0)])
            self.v[number] = torch.cat([self.v[number], self.stored(v[rows], 1)])
            for at in range(done, done + count):
                slots.append(self.pages[number][at // PAGE] * PAGE + at % PAGE)
            starts.append(rows.stop)
            lengths.append(done + count)
        rows = zip(batch, starts[:-1], strict=True)
        wanted = torch.cat([self.attention(n, q[a : a + c]) for (n, c), a in rows])
        return SimpleNamespace(
            q=q, k=k, v=v, slots=slots, starts=starts, lengths=lengths, wanted=wanted,
            tables=[self.pages[number] for number, _ in batch],
        )  # fmt: skip

    def stored(self, x: Tensor, which: int) -> Tensor:
        """Return keys or values as the cache stores them."""
        if not self.scales:
            return x.float()
        scale = self.scales[which][:, None]
        return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    def attention(self, number: int, q: Tensor) -> Tensor:
        """Return attention of the last queries of a sequence in float64."""
        k, v = (x[number].double().repeat_interleave(HQ // HKV, 1) for x in (self.k, self.v))
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * SCALE
        at = torch.arange(len(k))
        back = at[-len(q) :, None] - at
        seen = back >= 0
        if (window := self.layer.get("window")) is not None:
            seen &= back < window
        if self.layer.get("own"):
            seen &= (back < 9) | (at < 3)
            scores = scores * 1.5
        if (cap := self.layer.get("cap")) is not None:
            scores = cap * torch.tanh(scores / cap)
        if self.layer.get("slopes"):
            scores = scores - torch.tensor(SLOPES).double()[:, None, None] * back
        scores = scores.masked_fill(~seen, float("-inf"))
        if self.layer.get("sinks"):
            sinks = self.sinks.double()[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., : len(k)]
        return torch.einsum("hqk,khd->qhd", weights, v)


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


def ints(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


# --- vLLM ------------------------


def vllm_impl(backend: Any, server: Server, **changes: Any) -> Any:
    """Construct a layer as vLLM does: with positions, and sinks by name."""
    layer = server.layer
    given = {
        "num_heads": HQ, "head_size": HEAD, "scale": SCALE, "num_kv_heads": HKV,
        "alibi_slopes": SLOPES if layer.get("slopes") else None,
        "sliding_window": layer.get("window"), "kv_cache_dtype": "fp8" if server.scales else "auto",
        "logits_soft_cap": layer.get("cap"), "attn_type": "decoder", "sharing": None,
    }  # fmt: skip
    sinks = {"sinks": server.sinks} if layer.get("sinks") else {}
    sinks = {"sinks": changes.pop("sinks")} if "sinks" in changes else sinks
    return backend.get_impl_cls()(*(given | changes).values(), **sinks)


def vllm_cache(backend: Any, layout: str, quantized: bool) -> Tensor:
    """Return a cache in which each number that was not written is NaN."""
    shapes = {
        "NHD": (PAGES, PAGE, HKV, 2 * HEAD),
        "HND": (PAGES, HKV, PAGE, 2 * HEAD),
        "pairs": backend.get_kv_cache_shape(PAGES, PAGE, HKV, HEAD),
    }
    cache = torch.full(shapes[layout], float("nan"), dtype=torch.bfloat16)
    if quantized:
        cache = torch.full(shapes[layout], 0x7F, dtype=torch.uint8)
    return cache.transpose(1, 2) if layout == "NHD" else cache


def vllm(case: str) -> dict[str, float]:
    import own_vllm

    own_vllm.register()
    own_vllm.register()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend = AttentionBackendEnum.CUSTOM.get_class()
    found: dict[str, float] = {}
    for number, layer in enumerate(CASES[case][1]):
        for layout in ("NHD", "HND", "pairs") if case in ("plain", "fp8") else ("NHD",):
            found |= vllm_layer(backend, Server(layer), layout, f"{number} {layout}")
    return found


def vllm_layer(backend: Any, server: Server, layout: str, name: str) -> dict[str, float]:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    impl = vllm_impl(backend, server)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context={"layer": SimpleNamespace(impl=impl)}
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=TOKENS, max_num_seqs=SEQUENCES),
    )
    builder = backend.get_builder_cls()(None, ["layer"], config, torch.device("cpu"))
    cache, found = vllm_cache(backend, layout, bool(server.scales)), {}
    scales = [s[0] if len(s) == 1 else s for s in server.scales] or [torch.tensor(1.0)] * 2
    layer = SimpleNamespace(_k_scale=scales[0], _v_scale=scales[1])
    for number, batch in enumerate(STEPS):
        padding = 3 if number == 2 else 0
        step = server.step(batch, padding)
        real, more = len(step.slots), SEQUENCES - len(batch)
        starts = ints(step.starts + [real] * more)
        table = ints(step.tables + [[PAGES - 1] * 4] * more)
        slots = ints(step.slots + [-1] * padding, torch.int64)
        longest = max(count for _, count in batch)
        common = CommonAttentionMetadata(
            starts, starts, ints(step.lengths + [0] * more), SEQUENCES, real + padding, longest,
            max(step.lengths), table, slots
        )  # fmt: skip
        metadata = builder.build_for_cudagraph_capture(common)
        assert metadata.workspace is not None
        out = torch.full((real + padding, HQ, HEAD), 7.0, dtype=torch.bfloat16)
        impl.do_kv_cache_update(layer, step.k, step.v, cache, slots)
        if not server.scales:  # vLLM's other readers of a cache expect keys before values
            page, row = divmod(step.slots[0], PAGE)
            stored = (
                cache[page, :, row] if cache.dim() == 4 else cache[page, :, row].transpose(0, 1)
            )
            assert torch.equal(stored.reshape(HKV, 2, HEAD)[:, 0], step.k[0])
        result = impl.forward(layer, step.q, step.k, step.v, cache, metadata, out)
        assert result is out
        assert (out[real:] == 7.0).all()
        found[f"{name} {number}"] = apart(out[:real], step.wanted)
    assert not impl.forward(layer, step.q, step.k, step.v, cache, None, out).any()
    return found


def vllm_refusals() -> dict[str, str]:
    """Return the messages of layers that the case `window` does not fit."""
    import own_vllm

    own_vllm.register()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    backend, server = AttentionBackendEnum.CUSTOM.get_class(), Server(CASES["window"][1][0])
    vllm_impl(backend, server)
    changes: dict[str, dict[str, Any]] = {
        "head": {"head_size": 64},
        "group": {"num_kv_heads": 4},
        "slopes": {"alibi_slopes": SLOPES},
        "no window": {"sliding_window": None},
        "window": {"sliding_window": 13},
        "cache": {"kv_cache_dtype": "fp8"},
        "cap": {"logits_soft_cap": 30.0},
        "type": {"attn_type": "encoder"},
        "sinks": {"sinks": None},
    }
    found = {}
    for name, change in changes.items():
        try:
            vllm_impl(backend, server, **change)
        except ValueError as error:
            found[name] = str(error)
    impl = vllm_impl(backend, server)
    try:
        impl.forward(None, None, None, None, None, None, None, output_scale=torch.ones(1))
    except NotImplementedError as error:
        found["output"] = str(error)
    register_backend(AttentionBackendEnum.CUSTOM, "other.Backend")
    try:
        own_vllm.register()
    except RuntimeError as error:
        found["custom"] = str(error)
    return found


def vllm_features() -> dict[str, list[str]]:
    """Return why vLLM's own check refuses configurations. The first fits `window`."""
    import own_vllm

    own_vllm.register()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend = AttentionBackendEnum.CUSTOM.get_class()
    capability = SimpleNamespace(major=9, minor=0)
    given = {
        "head_size": HEAD, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16,
        "use_mla": False, "has_sink": True, "use_sparse": False, "use_mm_prefix": False,
        "use_per_head_quant_scales": False, "device_capability": capability, "attn_type": "decoder",
    }  # fmt: skip
    changes: dict[str, dict[str, Any]] = {
        "fits": {},
        "head": {"head_size": 64},
        "dtype": {"dtype": torch.float16},
        "cache": {"kv_cache_dtype": "fp8"},
        "page": {"block_size": 24},
        "mla": {"use_mla": True},
        "scales": {"use_per_head_quant_scales": True},
        "old": {"device_capability": SimpleNamespace(major=7, minor=5)},
        "type": {"attn_type": "encoder"},
    }
    return {n: backend.validate_configuration(**(given | c)) for n, c in changes.items()}


# --- SGLang ------------------------


def sglang_runner(layer: dict[str, Any], **changes: Any) -> Any:
    """Return the parts of a ModelRunner that the backend reads."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if hasattr(parallel, "override_permanently"):
        parallel.override_permanently(attn_dcp_size=1, attn_cp_size=1)
    dtype = torch.float8_e4m3fn if layer.get("scales") else torch.bfloat16
    pool = MHATokenToKVPool(
        size=(PAGES - 1) * PAGE, page_size=PAGE, dtype=dtype, head_num=HKV, head_dim=HEAD,
        layer_num=1, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    for buffer in pool.get_kv_buffer(0):
        buffer.view(torch.uint8 if layer.get("scales") else torch.bfloat16).fill_(0)
    requests = SimpleNamespace(size=8, req_to_token=torch.zeros((8, 4 * PAGE), dtype=torch.int32))
    given = {
        "token_to_kv_pool": pool, "page_size": PAGE, "device": "cpu", "dtype": torch.bfloat16,
        "kv_cache_dtype": dtype, "use_mla_backend": False, "req_to_token_pool": requests,
        "spec_algorithm": SimpleNamespace(is_speculative=lambda: False),
        "model_config": SimpleNamespace(is_encoder_decoder=False),
    }  # fmt: skip
    return SimpleNamespace(**(given | changes))


def sglang_layer(layer: dict[str, Any], **changes: Any) -> Any:
    from sglang.srt.layers.radix_attention import RadixAttention

    given = {
        "num_heads": HQ, "head_dim": HEAD, "scaling": SCALE, "num_kv_heads": HKV, "layer_id": 0,
        "logit_cap": layer.get("cap", 0.0), "sliding_window_size": layer.get("window", 0) - 1,
    }  # fmt: skip
    return RadixAttention(**(given | changes))


def sglang_backend(runner: Any) -> Any:
    import own_sglang

    own_sglang.register()
    own_sglang.register()
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    assert ATTENTION_BACKEND_CHOICES.count("own") == 1
    return ATTENTION_BACKENDS["own"](runner)


def sglang(case: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for number, layer in enumerate(CASES[case][1]):
        found |= {f"{number} {n}": e for n, e in sglang_steps(layer, Server(layer)).items()}
    return found


def sglang_steps(options: dict[str, Any], server: Server) -> dict[str, float]:
    """Run the steps, then two steps of decodes as a CUDA graph runs them."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner, layer = sglang_runner(options), sglang_layer(options)
    backend, found = sglang_backend(runner), {}
    backend.init_cuda_graph_state(SEQUENCES, SEQUENCES)
    if server.scales:
        layer.k_scale, layer.v_scale = (s.clone() for s in server.scales)
        layer.k_scale_float, layer.v_scale_float = (float(s[0]) for s in server.scales)
    rows = [5, 2, 7]  # requests have rows in any order
    for row, pages in zip(rows, server.pages, strict=True):
        slots = torch.cat([torch.arange(PAGE) + page * PAGE for page in pages])
        runner.req_to_token_pool.req_to_token[row] = slots.int()
    for number, batch in enumerate((*STEPS, STEPS[2], STEPS[2])):
        step, graph = server.step(batch, 0), number > 2
        mode = ForwardMode.DECODE if number > 1 else (ForwardMode.EXTEND, ForwardMode.MIXED)[number]
        forward = SimpleNamespace(
            batch_size=len(batch), forward_mode=mode, seq_lens=ints(step.lengths, torch.int64),
            req_pool_indices=ints([rows[n] for n, _ in batch], torch.int64),
            extend_seq_lens=ints([c for _, c in batch]),
            extend_seq_lens_cpu=[c for _, c in batch] if number else None,
            out_cache_loc=ints(step.slots, torch.int64),
        )  # fmt: skip
        if graph:
            backend.init_forward_metadata_out_graph(forward, in_capture=number == 3)
            backend.init_forward_metadata_in_graph(forward)
        else:
            backend.init_forward_metadata(forward)
        sinks = {"sinks": server.sinks} if options.get("sinks") else {}
        q, k, v = (x.flatten(1) for x in (step.q, step.k, step.v))
        run = backend.forward_decode if number > 1 else backend.forward_extend
        out = run(q, k.view_as(step.k), v.view_as(step.v), layer, forward, **sinks)
        if not server.scales:
            stored = runner.token_to_kv_pool.get_kv_buffer(0)[0]
            assert torch.equal(stored[step.slots], step.k)
        found[f"{number}"] = apart(out.view(-1, HQ, HEAD), step.wanted)
    return found


def sglang_refusals() -> dict[str, str]:
    """Return the messages for models and layers that the case `window` does not fit."""
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    options, found = CASES["window"][1][0], {}
    speculative = SimpleNamespace(is_speculative=lambda: True)
    runners: dict[str, dict[str, Any]] = {
        "mla": {"use_mla_backend": True},
        "speculative": {"spec_algorithm": speculative},
        "encoder": {"model_config": SimpleNamespace(is_encoder_decoder=True)},
        "page": {"page_size": 1},
        "pool": {"token_to_kv_pool": SimpleNamespace()},
        "dtype": {"dtype": torch.float16},
        "cache": {"kv_cache_dtype": torch.float8_e4m3fn},
    }
    for name, change in runners.items():
        try:
            sglang_backend(sglang_runner(options, **change))
        except ValueError as error:
            found[name] = str(error)
    backend, server = sglang_backend(sglang_runner(options)), Server(options)
    layers: dict[str, dict[str, Any]] = {
        "head": {"head_dim": 64},
        "group": {"num_kv_heads": 4},
        "window": {"sliding_window_size": 12},
        "no window": {"sliding_window_size": -1},
        "cap": {"logit_cap": 30.0},
        "type": {"attn_type": AttentionType.ENCODER_ONLY},
        "cross": {"is_cross_attention": True},
        "irope": {"use_irope": True},
        "sinks": {},
        "more": {},
    }
    step = server.step(STEPS[0], 0)
    for name, change in layers.items():
        sinks = {} if name == "sinks" else {"sinks": server.sinks}
        more = {"score_mod": 1} if name == "more" else {}
        try:
            layer = sglang_layer(options, **change)
            backend.forward_extend(step.q, step.k, step.v, layer, None, **sinks, **more)
        except ValueError as error:
            found[name] = str(error)
    batch = SimpleNamespace(batch_size=1, forward_mode=ForwardMode.TARGET_VERIFY)
    for name in ("init_forward_metadata", "init_forward_metadata_out_graph"):
        try:
            getattr(backend, name)(batch)
        except ValueError as error:
            found[name] = str(error)
    return found


def main(engine: str, folder: Path, case: str) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, str(folder))
    calls: dict[str, Any] = {"vllm": vllm, "sglang": sglang}
    others = {
        "vllm refusals": vllm_refusals,
        "vllm features": vllm_features,
        "sglang refusals": sglang_refusals,
    }
    with torch.inference_mode():
        found = others[f"{engine} {case}"]() if case not in CASES else calls[engine](case)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])

"""Stand-ins for vLLM and SGLang, with the names and signatures that emitted backends use.

The signatures are those of vLLM 0.33.0 and SGLang 0.5.23. `test_engines.py` compares them with the
packages where these can be imported.
"""

from __future__ import annotations

from pathlib import Path

BACKEND = """
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

import torch


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionMetadata:
    pass


class AttentionBackend(ABC):
    supported_dtypes = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(1)]

    @staticmethod
    @abstractmethod
    def get_name(): ...

    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abstractmethod
    def get_builder_cls(): ...

    @classmethod
    def get_supported_head_sizes(cls):
        return []

    @classmethod
    def supports_sink(cls):
        return False

    @classmethod
    def supports_sliding_window(cls):
        return False

    @classmethod
    def supports_batch_invariance(cls):
        return False

    @classmethod
    def supports_per_head_quant_scales(cls):
        return False

    @classmethod
    def supports_compute_capability(cls, capability):
        return True


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True


T = TypeVar("T")


class AttentionMetadataBuilder(ABC, Generic[T]):
    _cudagraph_support = AttentionCGSupport.NEVER

    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)


class AttentionImpl(ABC, Generic[T]):
    @abstractmethod
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None,
        sliding_window=None, kv_cache_dtype="auto", logits_soft_cap=None,
        attn_type=AttentionType.DECODER, kv_sharing_target_layer_name=None,
    ): ...

    @abstractmethod
    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None,
        output_block_scale=None,
    ): ...
"""
REGISTRY = """
import importlib
from enum import Enum

_OVERRIDES = {}


class AttentionBackendEnum(Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None

    def get_path(self, include_classname=True):
        return _OVERRIDES[self]

    def get_class(self):
        module, _, name = self.get_path().rpartition(".")
        return getattr(importlib.import_module(module), name)

    def is_overridden(self):
        return self in _OVERRIDES


def register_backend(backend, class_path=None, is_mamba=False):
    _OVERRIDES[backend] = class_path
    return lambda cls: cls
"""
VLLM_UTILS = """
def get_kv_cache_layout():
    return "NHD"
"""
SGLANG_BACKEND = """
from abc import ABC


class AttentionBackend(ABC):
    needs_cpu_seq_lens = True
    forward_metadata = None

    def init_forward_metadata(self, forward_batch): ...

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False): ...

    def init_forward_metadata_in_graph(self, forward_batch): ...

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        raise NotImplementedError

    def get_cuda_graph_seq_len_fill_value(self):
        raise NotImplementedError

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        decodes = forward_batch.forward_mode.is_decode()
        call = self.forward_decode if decodes else self.forward_extend
        return call(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        raise NotImplementedError

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        raise NotImplementedError
"""
SGLANG_REGISTRY = """
ATTENTION_BACKENDS = {}


def register_attention_backend(name):
    def decorator(fn):
        ATTENTION_BACKENDS[name] = fn
        return fn

    return decorator
"""
SGLANG_ARGS = """
ATTENTION_BACKEND_CHOICES = ["triton"]
add_attention_backend_choices = ATTENTION_BACKEND_CHOICES.extend
"""
RADIX = """
from enum import Enum

from torch import nn


class AttentionType(Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class RadixAttention(nn.Module):
    def __init__(
        self, num_heads, head_dim, scaling, num_kv_heads, layer_id, logit_cap=0.0, v_head_dim=-1,
        sliding_window_size=-1, is_cross_attention=False, pos_encoding_mode="NONE",
        logit_capping_method="tanh", quant_config=None, attn_type=AttentionType.DECODER,
        use_irope=False, prefix="", use_prefill_attention_wrapper=True,
    ):
        super().__init__()
        self.tp_q_head_num, self.tp_k_head_num = num_heads, num_kv_heads
        self.tp_v_head_num = num_kv_heads
        self.head_dim = self.qk_head_dim = head_dim
        self.v_head_dim = v_head_dim if v_head_dim != -1 else head_dim
        self.scaling, self.layer_id, self.logit_cap = scaling, layer_id, logit_cap
        self.sliding_window_size = sliding_window_size or -1
        self.is_cross_attention, self.use_irope = is_cross_attention, use_irope
        self.k_scale = self.v_scale = self.k_scale_float = self.v_scale_float = None
        self.attn_type, self.logit_capping_method = attn_type, logit_capping_method
        self.xai_temperature_len = -1
"""
POOL = """
import torch


class MHATokenToKVPool:
    def __init__(
        self, size, page_size, dtype, head_num, head_dim, layer_num, device, enable_memory_saver,
        v_head_dim=None, **options
    ):
        rows = size + page_size
        self.k_buffer = [torch.zeros(rows, head_num, head_dim).to(dtype) for _ in range(layer_num)]
        self.v_buffer = [
            torch.zeros(rows, head_num, v_head_dim or head_dim).to(dtype) for _ in range(layer_num)
        ]

    def get_kv_buffer(self, layer_id):
        return self.k_buffer[layer_id], self.v_buffer[layer_id]
"""
CONTEXT = """
from types import SimpleNamespace

_PARALLEL = SimpleNamespace(attn_dcp_size=1, attn_cp_size=1)


def get_parallel():
    return _PARALLEL
"""
BATCH = """
from enum import IntEnum, auto


class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()

    def is_decode(self):
        return self == ForwardMode.DECODE

    def is_decode_or_idle(self):
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_extend_or_draft_extend_or_mixed(self, include_draft_extend_v2=False):
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED)
"""
STAND_INS = {
    "vllm": {
        "v1/attention/backend": BACKEND,
        "v1/attention/backends/registry": REGISTRY,
        "v1/attention/backends/utils": VLLM_UTILS,
    },
    "sglang": {
        "srt/layers/attention/base_attn_backend": SGLANG_BACKEND,
        "srt/layers/attention/attention_registry": SGLANG_REGISTRY,
        "srt/layers/radix_attention": RADIX,
        "srt/mem_cache/memory_pool": POOL,
        "srt/model_executor/forward_batch_info": BATCH,
        "srt/runtime_context": CONTEXT,
        "srt/server_args": SGLANG_ARGS,
    },
}


def stand_in(engine: str, folder: Path) -> None:
    """Write a package `vllm` or `sglang` into a folder."""
    for name, text in STAND_INS[engine].items():
        path = folder / engine / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path in [folder / engine, *(folder / engine).rglob("*")]:
        if path.is_dir():  # a regular package comes before an installed one
            (path / "__init__.py").touch()

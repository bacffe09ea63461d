"""The mods and masks of attn-gym: field, EXPR, and the reason if kgen refuses it.

B is 2, HQ is 4, SQ and SK are 64.
"""

from __future__ import annotations

import torch

ACCEPTED = [
    ("mask_mod", "causal_mask"),
    ("mask_mod", "batchify_mask_mod(causal_mask, 24)"),
    ("mask_mod", "batchify_mask_mod(generate_sliding_window(5), 24)"),
    ("mask_mod", "generate_block_diffusion_mask(32, 8)"),
    ("mask_mod", "generate_dilated_sliding_window(12, 3)"),
    ("mask_mod", "generate_doc_mask_mod(causal_mask, OFFSETS)"),
    ("mask_mod", "generate_doc_mask_mod(generate_prefix_lm_mask(5), OFFSETS)"),
    ("mask_mod", "generate_packed_causal_doc_mask_mod(OFFSETS)"),
    ("mask_mod", "generate_vision_cross_attention_mask_mod(INTERVALS, 16)"),
    ("mask_mod", "generate_global_sliding_window(9, IS_GLOBAL)"),
    (
        "mask_mod",
        (
            "generate_jetspec_tree_causal_mask_mod(8, ANCESTORS := torch.zeros(64, 64, "
            "dtype=torch.bool))"
        ),
    ),
    ("mask_mod", "generate_jetspec_training_mask_mod(8, 14)"),
    ("mask_mod", "generate_natten(8, 8, 3, 3)"),
    ("mask_mod", "generate_tiled_natten(8, 8, 3, 3, 4, 4)"),
    ("mask_mod", "generate_morton_natten(8, 8, 3, 3)"),
    ("mask_mod", "generate_prefix_lm_mask(20)"),
    ("mask_mod", "generate_shared_prefix_mask_mod(OFFSETS, PREFIXES)"),
    ("mask_mod", "generate_sliding_window(10)"),
    ("mask_mod", "generate_sta_mask_mod_2d((8, 8), (4, 4), (2, 2))"),
    ("mask_mod", "generate_sta_mask_mod_2d((8, 6), (4, 2), (2, 2), 10)"),
    ("mask_mod", "generate_sta_mask_mod_3d((4, 4, 4), (2, 2, 2), (2, 2, 2))"),
    ("mask_mod", "generate_spatial_head_mask_mod(8, 4, 14, 2, False, 16)"),
    ("mask_mod", "generate_spatial_head_mask_mod(8, 4, 14, 2, True, 16)"),
    ("mask_mod", "generate_temporal_head_mask_mod(8, 4, 14, 2)"),
    ("score_mod", "generate_activation_score_mod()"),
    ("score_mod", "generate_activation_score_mod(torch.sigmoid, 2.0)"),
    ("score_mod", "generate_alibi_bias(4)"),
    ("score_mod", "generate_graphormer_spatial_bias(SPATIAL, DISTANCES)"),
    (
        "score_mod",
        "generate_graphormer_edge_bias("
        "EDGES, TYPES := torch.zeros(2, 64, 64, 2, dtype=torch.int32), DISTANCES)",
    ),
    ("score_mod", "generate_sandwich_bias(4, 64)"),
    ("score_mod", "generate_tanh_softcap(20)"),
]

REFUSED = {
    ("mask_mod", "generate_vsa_mask_mod(TOPK, 16)"): (
        "it searches a list of tiles with `.any()`, which is a reduction",
        "error[not-in-language]",
    ),
    ("score_mod", "generate_mla_rope_score_mod(SPATIAL, SPATIAL, 4)"): (
        "`torch.dot` is a reduction: append the features to queries and keys, in `head_dim`",
        "error[reduction]",
    ),
    ("score_mod", "generate_tanh_softcap(20, approx=True)"): (
        "the class is a `torch.autograd.Function`: write `fast_math: true` in the spec instead",
        "error[not-known]",
    ),
}
"""By field and EXPR: the reason for the page, and the beginning of the message."""

HELPERS = {
    *(
        "build_tree_ancestor_matrix",
        "shortest_path_distances",
        "shortest_path_edge_types",
        "undo_softmax",
    ),
    *("compute_vsa_coarse_attention", "compute_vsa_tile_scores", "compute_vsa_topk_indices"),
    *("create_vsa_block_mask", "create_vsa_flash_block_mask", "create_vsa_tile_metadata"),
    *("lift_vsa_tile_output", "pool_to_vsa_tiles", "tile_vsa_sequence", "untile_vsa_sequence"),
    *(
        "validate_vsa_block_mask_inputs",
        "vsa_additive_combine",
        "vsa_gated_mix",
        "vsa_topk_from_sparsity",
    ),
}
"""Functions of the package that return no mod."""


def tensors() -> dict[str, torch.Tensor]:
    """The tensors that EXPRs name."""
    make = torch.Generator().manual_seed(2)
    edges = torch.randn(4, 2, 5, generator=make, dtype=torch.float64)
    starts = torch.tensor([0, 10, 30, 50])
    return {
        "OFFSETS": torch.tensor([0, 20, 50, 64], dtype=torch.int32),
        "PREFIXES": torch.tensor([0, 0, 1], dtype=torch.int32),
        "INTERVALS": torch.stack([starts, starts + 20], 1).int(),
        "IS_GLOBAL": torch.arange(64) % 17 == 3,
        "ANCESTORS": torch.rand(64, 64, generator=make) < 0.5,
        "SPATIAL": torch.randn(4, 9, generator=make, dtype=torch.float64),
        "DISTANCES": torch.randint(0, 4, (2, 64, 64), generator=make, dtype=torch.int32),
        "EDGES": edges,
        "TYPES": torch.randint(0, 5, (2, 64, 64, 2), generator=make, dtype=torch.int32),
        "TOPK": torch.zeros(2, 4, 4, 2, dtype=torch.int32),
        "table": edges[:, 0],
        "table_2": edges[:, 1],
    }

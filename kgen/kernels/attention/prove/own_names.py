"""Names that proofs and kernels have for themselves, and that a spec may have, too."""

from __future__ import annotations

from kgen.spec.load import Loaded
from kgen.spec.renaming import SECTIONS, inside

_OF_PROOFS = "tile row lane number other position consumer block pages size column kind count list inf"
_OF_KERNELS = (
    "q_idx q_start q_last q_live q_lo q_hi q_full_lo q_full_hi q_done q_gap q_tile q_blocks offs_m "
    "kv_idx kv_start kv_last kv_live kv_lo kv_hi kv_full_lo kv_full_hi kv_done kv_gap kv_tile kv_blocks offs_n "
    "own_full_lo own_full_hi n_tiles n_ahead n_past n_first_masked n_last_masked n_masked n_partial n_full "
    "blocks first end mask qk lse delta ds scale logits core bias qk_scale row_rest block_table stride_tb stride_tp"
)
RESERVED = frozenset((*_OF_PROOFS.split(), *_OF_KERNELS.split()))


def apart(loaded: Loaded) -> Loaded:
    """The spec with other names for those that have a meaning in proofs, as they have in its files."""
    own = {name for section in SECTIONS for name in getattr(loaded.spec, section, ())}
    return inside(loaded, {name: f"{name}_arg" for name in own & RESERVED}) if own & RESERVED else loaded

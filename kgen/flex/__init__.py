"""FlexAttention's Python functions to specs, and back: read as text, never run."""

from kgen.flex.live import spec

__all__ = ["spec"]

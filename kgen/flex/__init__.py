"""Import of FlexAttention functions as specs, and the reverse.

The functions are read as text, never run.
"""

from kgen.flex.live import spec

__all__ = ["spec"]

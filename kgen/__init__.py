"""kgen turns a declarative spec into standalone GPU kernel source."""

__version__ = "0.1.0"

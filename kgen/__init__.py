"""kgen: from a declarative spec to standalone GPU kernel source."""

__version__ = "0.1.0"

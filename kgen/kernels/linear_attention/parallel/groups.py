"""The names of `kgen/targets/ranks/groups.py`, which packages contain under this name."""

from kgen.targets.ranks.groups import resolved as resolved

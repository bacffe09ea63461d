"""The names of `kgen/targets/ranks/groups.py`, which packages contain under this name."""

from kgen.targets.ranks.groups import group_of as group_of
from kgen.targets.ranks.groups import resolved as resolved

"""The names of `kgen/targets/ranks/agreement.py`, which packages contain under this name."""

from kgen.targets.ranks.agreement import Disagreement as Disagreement
from kgen.targets.ranks.agreement import Told as Told
from kgen.targets.ranks.agreement import Words as Words
from kgen.targets.ranks.agreement import digest as digest

"""Wrong offsets of packed sequences, for a number of tokens."""

TOKENS = 70
FAR = 2**31 - 1
OFFSETS = {
    "past the tokens": [0, 40, 1000],
    "descending": [0, 66, 5, 70],
    "negative": [-200, -200, 5, 70],
    "from the middle": [68, 69, 70],
    "far": [FAR, -FAR - 1, FAR, 7],
}

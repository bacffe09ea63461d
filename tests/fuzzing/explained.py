"""Seeds that fail for a reason that is no error of kgen's, each with the reason."""

EXPLAINED = {
    5329: "x = 1 is where tanh(x) * x and tanh(1) * x meet: a rounding decides which of the two max takes",
    7586: "tanh(7e-9) in a kernel of 16 bits, whose tanh is 6e-7 off at most",
    8889: "one row of eight numbers, where round_x_hat rounds one that lies between two of fp16",
    10473: "tanh(0) ** 3 alone in a row: a kernel of 16 bits has 6e-8 for tanh(0), and the row's scale is of it",
}
"""Of the generator that tests/fuzzing/seeds.json names."""

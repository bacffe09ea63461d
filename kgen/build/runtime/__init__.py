"""Load the machine code of a package instead of compiling: one module per target.

Packages contain copies.
"""

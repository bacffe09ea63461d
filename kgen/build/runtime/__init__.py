"""Loads the machine code of a package, in the place of compilers: a module for each target. Packages have them too."""

"""The kernel families: a package each, of everything that is about it, which `kgen.family` finds by
its name.
"""

"""Linear attention over sequences that are sharded over ranks: the runtime, which is emitted
unchanged.
"""

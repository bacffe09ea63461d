"""Who does the work of a verb: processes of this machine (`tasks.Here`), or those of a Ray cluster (`nodes.Farm`)."""

"""Pages for people: what they are made of, and how they are printed."""

"""Pages for people: their parts, and printers for each format."""

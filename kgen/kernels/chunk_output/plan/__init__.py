"""The plan of a chunk output, with its tile shapes."""

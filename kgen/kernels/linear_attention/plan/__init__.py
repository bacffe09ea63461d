"""The plan of linear attention: expressions over values, and their derivatives."""

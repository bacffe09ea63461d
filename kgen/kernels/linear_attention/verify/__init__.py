"""Linear attention: reference, difficult inputs and checks."""

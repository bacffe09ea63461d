"""Speed, measured against peers in one interleaved run."""

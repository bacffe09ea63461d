"""A chunk output becomes a frozen ChunkOutputPlan, with its tiles."""

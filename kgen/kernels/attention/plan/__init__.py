"""Planning: build a frozen `AttentionPlan` from a spec and its expressions."""

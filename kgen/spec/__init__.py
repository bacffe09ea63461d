"""What the user writes: YAML with source positions, pydantic models, JSON schema."""

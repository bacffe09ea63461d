"""Specs: YAML with source positions, pydantic models, JSON schema."""

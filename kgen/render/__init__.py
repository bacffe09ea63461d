"""Plans become files: jinja environment, provenance header, manifest, writer."""

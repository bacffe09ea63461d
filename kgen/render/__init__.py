"""Turn plans into files: jinja environment, provenance header, manifest, writer."""

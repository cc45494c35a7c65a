"""Source text: readable stage files and the manifest that binds them together."""

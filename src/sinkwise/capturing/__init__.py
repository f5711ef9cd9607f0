"""A callback for each attention call of a foreign model, which runs on unchanged."""

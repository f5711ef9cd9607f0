"""When a token is a sink, which mechanism it is, and what to do about a model."""

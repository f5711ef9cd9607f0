"""What answers a sink, put into a model that is already there, and taken out again."""

"""Foreign models: where their attention lives, what their tokens are, how they are loaded."""

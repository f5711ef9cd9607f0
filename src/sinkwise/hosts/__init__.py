"""Models from other libraries: their attention modules, their tokens, and how to load them."""

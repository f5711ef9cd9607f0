"""A stand-in for the package of that name."""

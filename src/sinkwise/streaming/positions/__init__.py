"""How each family of models encodes positions, and how cached keys are moved."""

"""Tasks that make one kind of attention sink on purpose, and two small models trained on them."""

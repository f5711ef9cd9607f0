"""Tasks that each need one kind of attention sink, and small models trained on them."""

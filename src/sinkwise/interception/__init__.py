"""How attention is recognised in a running model: one module for each form of call."""

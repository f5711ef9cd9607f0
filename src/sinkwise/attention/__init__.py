"""Pure mathematics of attention: tensors in, tensors out."""

"""Checkpoints: headers, the tensors they hold, names in the wild, loading, and refusals."""

"""The checkpoints' JSON of K3's siblings, one module a maker."""

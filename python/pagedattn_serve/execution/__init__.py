"""A scheduled batch through the model: cache tensors, flat inputs, sampled tokens."""

"""What decides the next token of a sequence: made for a request, read by the sampler."""

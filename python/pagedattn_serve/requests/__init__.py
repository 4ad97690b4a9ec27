"""A request, from the arguments of its caller to the outputs that the caller gets."""

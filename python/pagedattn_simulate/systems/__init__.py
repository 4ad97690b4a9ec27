"""The systems to compare: what each runs in a step, and what each keeps of memory."""

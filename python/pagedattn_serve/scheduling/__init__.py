"""Which sequences run in the next step, and on which blocks: plain Python over ints, without torch."""

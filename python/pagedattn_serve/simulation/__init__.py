"""A deployment without its hardware: the real scheduler, or another system's, on a clock that a cost model moves.

Ints and floats only, no torch. Nothing outside of this room and the command line knows it.
"""

"""What attn.py is made of: inputs (those of sweep.py, too), whom it meets on a GPU, the plan of a decode call."""

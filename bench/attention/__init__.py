"""Parts of attn.py: inputs (sweep.py uses them, too), peers on a GPU, the plan of a decode call."""

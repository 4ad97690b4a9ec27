"""Parts of serving.py and serving_cuda.py: workloads, a timed run, peers, experiments."""

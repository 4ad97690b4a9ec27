"""What serving.py and serving_cuda.py are made of: requests, a timed run, those that it stands beside, experiments."""

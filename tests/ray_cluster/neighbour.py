"""A cluster with one replica, on the port of the first argument. When standard input ends, the cluster ends."""

import sys

import ray
from ray import serve
from replicas import NODE, run

ray.init(address="local", **NODE, include_dashboard=False, log_to_driver=False)
serve.start(http_options={"port": int(sys.argv[1])})
run("neighbour")
print("serving", flush=True)
sys.stdin.read()
serve.shutdown()
ray.shutdown()

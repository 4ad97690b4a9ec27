"""Which CPUs a rank computes on, where the machine has several NUMA nodes.

Memory of another node takes longer to read, so a rank stays on one node, with its slice of the weights. On a machine
with one node the kernel places the ranks' threads better than a fixed plan would: it knows who else is running.
"""

from pathlib import Path

NODES = Path("/sys/devices/system/node")


def numa_nodes(allowed: set[int], nodes: Path = NODES) -> list[set[int]]:
    """The allowed CPUs of each NUMA node that has any; all as one node where the system does not tell."""
    found = []
    for file in sorted(nodes.glob("node*/cpulist"), key=lambda file: int(file.parent.name.removeprefix("node"))):
        cpus = parse_cpu_list(file.read_text(encoding="ascii")) & allowed
        if cpus:
            found.append(cpus)
    return found or [allowed]


def parse_cpu_list(text: str) -> set[int]:
    """ "0-3,8" is {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        begin, _, end = part.partition("-")
        cpus.update(range(int(begin), int(end or begin) + 1))
    return cpus


def cpus_of_rank(rank: int, world_size: int, nodes: list[set[int]]) -> set[int] | None:
    """The CPUs that a rank binds to; None if it does not bind, because there is one node.

    With fewer ranks than nodes a rank has several nodes. With more ranks, the ranks of a node share its CPUs out, or
    use all of them if these are fewer than the ranks.
    """
    if len(nodes) == 1:
        return None
    if world_size <= len(nodes):
        begin, end = (len(nodes) * i // world_size for i in (rank, rank + 1))
        return set().union(*nodes[begin:end])
    node_of = [len(nodes) * i // world_size for i in range(world_size)]
    node = sorted(nodes[node_of[rank]])
    sharing = [i for i in range(world_size) if node_of[i] == node_of[rank]]
    place = sharing.index(rank)
    begin, end = (len(node) * i // len(sharing) for i in (place, place + 1))
    return set(node[begin:end] if len(node) >= len(sharing) else node)

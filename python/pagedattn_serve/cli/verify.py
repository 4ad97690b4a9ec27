"""`pagedattn verify`: a table of what was tried, what differed, and where the first difference arose."""

from pagedattn_serve.distributed.torchrun import serve_as_rank
from pagedattn_serve.engine_args import EngineArgs
from pagedattn_serve.verification.local import verify
from pagedattn_serve.verification.server import Server, verify_server

ROW = "{:26}{:>9}  {:28}{}"


def verify_model(args: EngineArgs) -> int:
    """Returns the exit status: 1 if anything differs."""
    serve_as_rank(args.num_ranks)  # before the table, which is rank 0's
    num_different = num_tried = 0
    print(ROW.format("condition", "requests", "what happened", "same bits"))
    for i, each in enumerate(verify(args)):
        verdict = "yes" if i else "what all others are compared with"
        if each.difference is not None:
            verdict = "no"
            num_different += 1
        elif not each.happened:
            verdict = "not tried"
        num_tried += i > 0 and verdict != "not tried"
        print(ROW.format(each.condition.name, each.num_requests, each.happened or "nothing", verdict), flush=True)
        if each.difference is not None:
            print(f"    {each.difference}", flush=True)
        if each.origin is not None:
            print(f"    arose in {each.origin}", flush=True)
    return conclude(num_different, num_tried, "conditions")


def verify_url(url: str, model: str | None) -> int:
    """The same for a server."""
    server = Server(url, model)
    print(f"{server.model} at {url}")
    print(ROW.format("asked", "requests", "other than alone", "same answers"))
    num_different = num_tried = 0
    for i, each in enumerate(verify_server(server)):
        verdict = "no" if each.difference else "yes" if i else "what all others are compared with"
        num_tried += i > 0
        num_different += each.difference is not None
        print(ROW.format(each.name, each.num_requests, f"{each.num_different}", verdict), flush=True)
        if each.difference is not None:
            print(f"    {each.difference}", flush=True)
    return conclude(num_different, num_tried, "ways of asking")


def conclude(num_different: int, num_tried: int, what: str) -> int:
    if num_different:
        print(f"different under {num_different} of {num_tried} {what}")
        return 1
    print(f"the same, bit for bit, under all {num_tried} {what} that were tried")
    return 0

"""`PipelineCommunicator`: what a rank asks of the others where layers are split over ranks; and a step in pieces, so
that all stages work at once.

Rank s * ranks_per_stage + i is the i-th one of a stage. Rank 0 samples, so its stage is the last one of the model, and
hidden states go from a rank to the one that is ranks_per_stage below. The ranks of a stage share memory. Between stages
there are sockets: pairs that rank 0 makes, or TCP connections where ranks are on several hosts.
"""

import select
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from pagedattn_serve.distributed import communicator
from pagedattn_serve.distributed.activity import LOOK_SECONDS
from pagedattn_serve.distributed.channel import has_hung_up
from pagedattn_serve.distributed.communicator import SharedMemoryCommunicator
from pagedattn_serve.distributed.hosts import HostsCommunicator
from pagedattn_serve.distributed.links import CHECK_SECONDS, LinkedCommunicator, Transfer, bytes_of
from pagedattn_serve.distributed.process_group import ProcessGroupCommunicator
from pagedattn_serve.execution.model_runner import StepInputs, StepRunner
from pagedattn_serve.models.causal_lm import CausalLM, ModelOutput
from pagedattn_serve.models.native import NativeCausalLM
from pagedattn_serve.models.partition import Partition
from pagedattn_serve.models.stages import Trunk

# A piece reads all weights, however few tokens it has. With fewer tokens, that takes longer than stages gain.
MIN_PIECE_TOKENS = 32
MAX_PIECES_PER_STAGE = 4


class PipelineCommunicator(LinkedCommunicator):
    """A `models.partition.Communicator` among the ranks of a stage, with connections to the stages before and behind.

    at_work: on rank 0, whether another rank computes; it is asked every LOOK_SECONDS. The other ranks wait for each
    other as long as rank 0 does.
    """

    def __init__(self, rank: int, world_size: int, num_stages: int) -> None:
        self.world_size = world_size // num_stages
        self.num_stages = num_stages
        place, rank_in_stage = divmod(rank, self.world_size)
        self.stage = num_stages - 1 - place
        self.at_work: Callable[[], bool] | None = None
        peers = [peer for peer in (rank - self.world_size, rank + self.world_size) if 0 <= peer < world_size]
        super().__init__(rank, SharedMemoryCommunicator(rank_in_stage, self.world_size), peers)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._near.all_reduce(tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._near.all_gather(tensor)

    def send(self, carried: Tensor) -> None:
        """Give the next stage what this one has computed. Raises RuntimeError if the group is broken."""
        self._move(self.rank - self.world_size, bytes_of(carried.contiguous()), memoryview(b""))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What the stage before has computed, of this shape. Raises RuntimeError if the group is broken."""
        carried = torch.empty(shape, dtype=dtype)
        self._move(self.rank + self.world_size, memoryview(b""), bytes_of(carried))
        return carried

    def check(self) -> None:
        """Raise RuntimeError if the group is broken."""
        for rank, link in self._links.items():
            if has_hung_up(link):
                raise self._lost(rank)

    def _move(self, rank: int, to_send: memoryview, to_receive: memoryview) -> None:
        link = self._links[rank]
        transfer = Transfer(rank, link, to_send, to_receive)
        poll = select.poll()
        looked = worked = time.monotonic()
        try:
            missing = transfer.proceed(select.POLLOUT)
            while missing:
                poll.register(link, missing)
                for _, events in poll.poll(CHECK_SECONDS * 1000):
                    missing = transfer.proceed(events)
                now = time.monotonic()
                if missing and now - looked > LOOK_SECONDS:
                    looked = now
                    self.check()
                    self._check_near()
                    if self.at_work is None or self.at_work():
                        worked = now
                    elif now - worked > communicator.PATIENCE_SECONDS:
                        patience = f"{communicator.PATIENCE_SECONDS:g} seconds"
                        raise self._break(f"rank {rank} has not come, and no rank has computed within {patience}")
        except OSError:
            raise self._lost(rank) from None


AnyCommunicator = SharedMemoryCommunicator | HostsCommunicator | PipelineCommunicator | ProcessGroupCommunicator


def make_communicator(rank: int, world_size: int, num_hosts: int, device: str, num_stages: int = 1) -> AnyCommunicator:
    if device != "cpu":
        return ProcessGroupCommunicator(rank, world_size, torch.device(device))
    if num_stages > 1:
        return PipelineCommunicator(rank, world_size, num_stages)
    if num_hosts == 1:
        return SharedMemoryCommunicator(rank, world_size)
    return HostsCommunicator(rank, world_size, num_hosts)


def partition_of(ranks: AnyCommunicator) -> Partition:
    """The slice of a model that the rank holds."""
    if isinstance(ranks, PipelineCommunicator):
        in_stage = ranks.rank % ranks.world_size
        return Partition(in_stage, ranks.world_size, ranks, stage=ranks.stage, num_stages=ranks.num_stages)
    return Partition(ranks.rank, ranks.world_size, ranks)


def watch_layers(model: CausalLM, ranks: AnyCommunicator) -> None:
    """Let the step of a stage end within a layer if the group breaks."""
    if not isinstance(ranks, PipelineCommunicator):
        return
    [trunk] = [module for module in model.modules() if isinstance(module, Trunk)]
    for layer in trunk.get_submodule(trunk.LAYERS).children():
        layer.register_forward_pre_hook(lambda *_: ranks.check())


def cut(num_tokens: int, ranks: AnyCommunicator) -> list[int]:
    """Where the pieces of a step begin, and where the last one ends. Without stages, and with few tokens, the step is
    one piece."""
    num_stages = ranks.num_stages if isinstance(ranks, PipelineCommunicator) else 0
    num_pieces = max(min(num_tokens // MIN_PIECE_TOKENS, num_stages * MAX_PIECES_PER_STAGE), 1)
    return [num_tokens * i // num_pieces for i in range(num_pieces + 1)]


def run_step(runner: StepRunner, ranks: AnyCommunicator, inputs: StepInputs, cuts: list[int]) -> ModelOutput:
    """What `StepRunner.run_model` gives, on the last stage. All stages run the same pieces in the same order: a stage
    takes a piece from the stage before, which goes on with the next one."""
    if not isinstance(ranks, PipelineCommunicator):
        return runner.run_model(inputs)
    model, pipeline = runner.model, ranks
    assert isinstance(model, NativeCausalLM)
    num_logits = len(inputs.sampling_rows) - inputs.num_pooled
    output = ModelOutput(torch.empty(0))
    for begin, end in pairwise(cuts):
        piece, picked = inputs.between(begin, end) if len(cuts) > 2 else (inputs, None)
        carried = None
        if pipeline.stage > 0:
            num_carried, hidden_size = model.carried_shape
            carried = pipeline.receive((num_carried, end - begin, hidden_size), model.dtype)
        ran = runner.run_model(piece, carried)
        if not model.is_last_stage:
            pipeline.send(ran.logits)
        elif picked is None:
            return ran
        else:
            if begin == 0:
                output = ModelOutput(ran.logits.new_empty(num_logits, model.vocab_size))
            of_pooled = picked >= num_logits
            output.logits[torch.from_numpy(picked[~of_pooled])] = ran.logits
            if ran.hidden is not None:
                if output.hidden is None:
                    output = output._replace(hidden=ran.hidden.new_empty(inputs.num_pooled, ran.hidden.shape[1]))
                assert output.hidden is not None
                output.hidden[torch.from_numpy(picked[of_pooled] - num_logits)] = ran.hidden
    return output

"""The states that layers keep between tokens beside keys and values, in slots, on the device and on the host."""

from collections.abc import Sequence

import torch

from pagedattn_serve.errors import reason_of
from pagedattn_serve.execution.cache_engine import HostMemoryError
from pagedattn_serve.models.causal_lm import StateShape
from pagedattn_serve.scheduling.sequence import StateCopies


class StateCache:
    """All slots of each state of a model. A slot is one place in each tensor.

    states: of the model (`CausalLM.states`).
    tensors: for each state, [num_slots, *shape].

    Raises HostMemoryError for slots on the host that do not fit.
    """

    def __init__(self, states: Sequence[StateShape], num_slots: int, device: str, num_host_slots: int = 0) -> None:
        # Not filled: a sequence that begins does not look at its slot, and memory never written is never taken.
        self.tensors = [torch.empty(num_slots, *state.shape, dtype=state.dtype, device=device) for state in states]
        try:
            self._host_tensors = [torch.empty(num_host_slots, *state.shape, dtype=state.dtype) for state in states]
        except (MemoryError, RuntimeError) as error:  # the allocator decides which of the two it raises
            num_bytes = num_host_slots * bytes_per_slot(states)
            raise HostMemoryError(
                f"swap_space: expected states that fit in the host's memory, got {num_host_slots:,} of them, "
                f"{num_bytes:,} bytes ({reason_of(error)})"
            ) from None

    def copy(self, copies: StateCopies) -> None:
        """Make the copies. Pairs that are copied are taken out of their list."""
        for pairs, sources, targets in (
            (copies.to_swap_out, self.tensors, self._host_tensors),
            (copies.to_swap_in, self._host_tensors, self.tensors),
            (copies.to_copy, self.tensors, self.tensors),
        ):
            if pairs:
                source, target = torch.tensor(pairs).unbind(1)
                for from_, to in zip(sources, targets, strict=True):
                    to[target.to(to.device)] = from_[source.to(from_.device)].to(to.device)
                pairs.clear()


def bytes_per_slot(states: Sequence[StateShape]) -> int:
    """Bytes that the states of one sequence take, over all layers."""
    return sum(state.num_bytes for state in states)

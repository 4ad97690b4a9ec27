"""Pipeline parallel (GPipe, Huang et al., 2019): which layers of a model a rank holds, and what it hands on.

The layers are cut into stages. The first stage has the embedding, too, and the last one the norm behind the layers and
the head. A tied embedding is in both. What passes from a layer to the next passes from a stage to the next as well.
"""

from collections.abc import Iterable
from typing import ClassVar

from torch import nn

from pagedattn_serve.models.partition import Partition


class Trunk(nn.Module):
    """The layers of a family, with what stands before and behind them.

    LAYERS: the name of the list of layers. BEFORE, BEHIND: names of what only the first or the last stage computes.
    NUM_CARRIED: tensors that pass from layer to layer, each [num_tokens, hidden_size].
    is_last: whether the trunk returns what the head reads; else what its last layer gives the next one, [NUM_CARRIED,
        num_tokens, hidden_size].
    """

    LAYERS: ClassVar[str]
    BEFORE: ClassVar[tuple[str, ...]]
    BEHIND: ClassVar[tuple[str, ...]]
    NUM_CARRIED: ClassVar[int] = 1

    is_last = True

    def keep_stage(self, partition: Partition, kept: Iterable[nn.Module] = ()) -> list[str]:
        """Give up what is in other stages, but for modules in `kept`. Layers keep their names. Returns the names of
        what was given up."""
        layers = self.get_submodule(self.LAYERS)
        own = partition.layers(len(layers._modules))
        dropped = [(layers, name) for i, name in enumerate(layers._modules) if not own.start <= i < own.stop]
        if partition.stage > 0:
            dropped += [(self, name) for name in self.BEFORE if self.get_submodule(name) not in kept]
        self.is_last = partition.is_last_stage
        if not self.is_last:
            dropped += [(self, name) for name in self.BEHIND]
        for parent, name in dropped:
            del parent._modules[name]
        return [f"{self.LAYERS}.{name}" if parent is layers else name for parent, name in dropped]

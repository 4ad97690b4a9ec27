"""Layers of transformers that keep a state between tokens: transformers' own mixers, on the state slots of the engine.

A mixer (Gated DeltaNet, Mamba, a short convolution) asks a cache of transformers for its states, and hands the new
states back. Here it gets a `MixerCache` in that place. It is called once for all sequences that run a single token, and
once for each chunk of a prompt. Convolutions and recurrences, which transformers has as functions in torch, run on the
ops.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pagedattn_ext import causal_conv1d, fla, mamba_ssm, ops
from pagedattn_serve.models.causal_lm import SequenceRows, StateShape, StepStates
from pagedattn_serve.models.transformers_positions import CACHE_ARGUMENTS, cache_argument

# A module is a mixer if its forward calls one of these methods of a cache.
WRITES = {"update_conv_state", "update_recurrent_state", "set_linear_cache"}
CONVOLUTION, RECURRENT = "convolution", "recurrent"


class StateKey(NamedTuple):
    """Which state: of which layer, CONVOLUTION or RECURRENT, and which of several of the kind."""

    layer: int
    kind: str
    number: int


@dataclass(slots=True, frozen=True)
class InSlots:
    """The states of some sequences, where they lie. states: [num_slots, *shape]. slots: int64 [num_seqs]; None: all."""

    states: Tensor
    slots: Tensor | None

    def __getitem__(self, index: tuple[slice, int]) -> "InSlots":
        """Of all sequences, a part of the state: Zamba's mixer runs head by head."""
        return InSlots(self.states[index], self.slots)


class MixerCache:
    """The part of transformers' caches that mixers use.

    states: of the sequences that the mixer is called with, by key, [num_seqs, *shape], or `InSlots` for functions that
        are on the ops. They are overwritten.
    is_new: whether the sequences begin, so that what is in their states does not count.
    """

    def __init__(self, states: dict[StateKey, Any], is_new: bool) -> None:
        self._states = states
        self._is_new = is_new

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return not self._is_new

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | InSlots | None:
        return None if self._is_new else self._states.get(StateKey(layer_idx, CONVOLUTION, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | InSlots | None:
        return None if self._is_new else self._states.get(StateKey(layer_idx, RECURRENT, state_idx))

    def get_linear_cache(self, layer_idx: int) -> Tensor | InSlots | None:
        return self.get_recurrent_state(layer_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """conv_states: new columns, [num_seqs, channels, num_tokens]. Returns them behind those of the state, or behind
        zeros where they are fewer than a state has."""
        size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        key = StateKey(layer_idx, CONVOLUTION, state_idx)
        state = self._state_of(key, conv_states.new_empty(*conv_states.shape[:-1], size))
        if not self._is_new:
            conv_states = torch.cat([state, conv_states], dim=-1)
        elif (missing := state.shape[-1] - conv_states.shape[-1]) > 0:
            conv_states = nn.functional.pad(conv_states, (missing, 0))
        state.copy_(conv_states[..., -state.shape[-1] :])
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor | InSlots, layer_idx: int, state_idx: int = 0
    ) -> Tensor | InSlots:
        if isinstance(recurrent_states, InSlots):
            return recurrent_states  # an op has written them
        state = self._state_of(StateKey(layer_idx, RECURRENT, state_idx), recurrent_states)
        return state.copy_(recurrent_states)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)

    def _state_of(self, key: StateKey, like: Tensor) -> Tensor:
        return self._states[key]


class TrialCache(MixerCache):
    """Notes what states a mixer keeps, by key."""

    def __init__(self) -> None:
        super().__init__({}, is_new=True)

    def _state_of(self, key: StateKey, like: Tensor) -> Tensor:
        return self._states.setdefault(key, torch.empty_like(like))

    def shapes(self) -> dict[StateKey, StateShape]:
        """The states of a sequence. In the order of the layers."""
        return {key: StateShape(state.shape[1:], state.dtype) for key, state in sorted(self._states.items())}


class Call(NamedTuple):
    """One call of a mixer: for one token of each of some sequences, or for a chunk of one sequence.

    rows: of the step, a slice or int64 [num_seqs]. slots: of the states, in the same order.
    is_new: whether it is a chunk at the beginning of its sequence. kept_in: as in `SequenceRows`.
    """

    rows: slice | Tensor
    slots: slice | Tensor
    is_new: bool
    kept_in: int | None = None

    @property
    def is_chunk(self) -> bool:
        return isinstance(self.rows, slice)

    @property
    def is_single(self) -> bool:
        """Whether it is one token that follows others, of each sequence."""
        return not isinstance(self.rows, slice) or (self.rows.stop - self.rows.start == 1 and not self.is_new)


class StateStep:
    """The states of all layers in one step, and the calls that a mixer runs the step with.

    keys: of the model's states, in the order of `states.tensors`.
    """

    def __init__(self, keys: Sequence[StateKey], states: StepStates) -> None:
        self._of_layers: dict[int, dict[StateKey, Tensor]] = {}
        for key, tensor in zip(keys, states.tensors, strict=True):
            self._of_layers.setdefault(key.layer, {})[key] = tensor
        self.calls: list[Call] = []
        if states.slots is not None:
            self.calls.append(Call(torch.arange(len(states.slots), device=states.slots.device), states.slots, False))
        single: list[SequenceRows] = []
        for rows in states.rows:  # one row that follows others of its sequence comes after them: it is among the last
            if rows.num_rows == 1 and not rows.is_new and rows.kept_in is None:
                single.append(rows)
            else:
                self.calls.append(_chunk(rows))
        if single:
            device = states.tensors[0].device
            of_step = torch.tensor([each.begin for each in single], device=device)
            slots = torch.tensor([each.slot for each in single], device=device)
            self.calls.append(Call(of_step, slots, is_new=False))

    def of_layer(self, layer: int) -> dict[StateKey, Tensor]:
        """The states of a layer, [num_slots, *shape]."""
        return self._of_layers[layer]


def _chunk(rows: SequenceRows) -> Call:
    of_step, slots = slice(rows.begin, rows.begin + rows.num_rows), slice(rows.slot, rows.slot + 1)
    return Call(of_step, slots, rows.is_new, rows.kept_in)


# ---- what mixers call, on the ops -----------------------------------------------------------------------------------


def causal_conv1d_update(
    x: Tensor, conv_state: InSlots, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    return causal_conv1d.causal_conv1d_update(
        x, conv_state.states, weight, bias, activation, conv_state_indices=conv_state.slots
    )


def recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: InSlots, use_qk_l2norm_in_kernel: bool
) -> tuple[Tensor, InSlots]:
    """Of one token of each sequence. The states are updated where they lie."""
    query, key, value, decay, rate = (tensor.flatten(0, 1) for tensor in (q, k, v, g, beta))
    out = ops.gated_delta_rule(
        query, key, value, decay, rate, initial_state.states,
        use_qk_l2norm=use_qk_l2norm_in_kernel, state_indices=initial_state.slots,
    )  # fmt: skip
    return out.view(v.shape), initial_state


def selective_state_update(
    state: InSlots, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
) -> Tensor:  # fmt: skip
    return mamba_ssm.selective_state_update(state.states, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state.slots)


def mamba2_selective_state_update(
    state: InSlots, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
) -> Tensor:  # fmt: skip
    """The gate comes after the rounding, as mixers have it behind a chunk: a token has the same bits either way."""
    out = selective_state_update(state, x, dt, A, B, C, D, None, dt_bias, dt_softplus)
    return out if z is None else out * nn.functional.silu(z)


def takes_all(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with any other named arguments as well, which it does not get. transformers hands over arguments of
    several libraries."""
    names = inspect.signature(function).parameters

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: argument for name, argument in kwargs.items() if name in names})

    return call


# By the names of functions in transformers' modules: those that take a chunk, and those that take states in slots.
OF_CHUNKS = {
    "causal_conv1d_fn": takes_all(causal_conv1d.causal_conv1d_fn),
    "torch_chunk_gated_delta_rule": takes_all(fla.chunk_gated_delta_rule),
    "mamba2_chunk_scan": takes_all(mamba_ssm.mamba_chunk_scan_combined),
    "mamba_selective_scan": takes_all(mamba_ssm.selective_scan_fn),
}
OF_SLOTS = {
    CONVOLUTION: {"causal_conv1d_update": takes_all(causal_conv1d_update)},
    RECURRENT: {
        "torch_recurrent_gated_delta_rule": takes_all(recurrent_gated_delta_rule),
        "mamba2_selective_state_update": takes_all(mamba2_selective_state_update),
        "mamba_selective_state_update": takes_all(selective_state_update),
    },
}
ON_OPS = OF_CHUNKS | OF_SLOTS[CONVOLUTION] | OF_SLOTS[RECURRENT]


def forward_on_ops(mixer: nn.Module) -> Callable[..., Any]:
    """The mixer's forward, with the ops in the place of the functions of its module. The module stays as it is."""
    forward = inspect.unwrap(type(mixer).forward)
    scope = {**forward.__globals__, **{name: ON_OPS[name] for name in ON_OPS.keys() & forward.__globals__.keys()}}
    on_ops = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
    on_ops.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(on_ops, mixer)


class MixerForward:
    """The forward of a mixer, in the place of its own. `mixer.pagedattn` says where it is called: in a trial, in a step
    of the engine, or by transformers alone."""

    def __init__(self, mixer: Any, cache_argument: str) -> None:
        self._mixer = mixer
        self._alone = mixer.forward
        self._on_ops = forward_on_ops(mixer)
        called = set(inspect.unwrap(type(mixer).forward).__code__.co_names)
        self._kinds_in_slots = {kind for kind, functions in OF_SLOTS.items() if called & functions.keys()}
        self._signature = inspect.signature(mixer.forward)
        self._cache_argument = cache_argument
        self.forgets: bool | None = None  # whether a chunk begins without the state before it; None: not tried yet

    def module_names(self, model: nn.Module) -> list[str]:
        """Of the mixer and of all that lies in it, in this model."""
        parts = set(self._mixer.modules())
        return [name for name, module in model.named_modules() if module in parts]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        place = self._mixer.pagedattn
        if place.is_alone:
            return self._alone(*args, **kwargs)
        arguments = self._signature.bind(*args, **kwargs).arguments
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments.update(arguments.pop(name, {}))
        hidden: Tensor = arguments.pop("hidden_states")
        if "attention_mask" in arguments:
            arguments["attention_mask"] = None  # it would say which rows are padding, and there is none
        if place.is_trial:
            with place.within_mixer(self._mixer.layer_idx):
                arguments[self._cache_argument] = place.mixer_cache
                return self._alone(hidden, **arguments)
        return self._run(hidden[0], place.states, arguments)

    def _run(self, hidden: Tensor, step: StateStep, arguments: dict[str, Any]) -> Any:
        """hidden: all rows of the step, [num_rows, hidden_size]."""
        states = step.of_layer(self._mixer.layer_idx)
        out: Tensor | None = None
        result: Any = None
        for call in self._split(step.calls, hidden, states, arguments):
            rows = hidden[call.rows]
            of_sequences = {key: self._of_sequences(key, state, call) for key, state in states.items()}
            arguments[self._cache_argument] = MixerCache(of_sequences, call.is_new)
            result = self._on_ops(rows[None] if call.is_chunk else rows[:, None], **arguments)
            mixed = result[0] if isinstance(result, tuple) else result
            if out is None:
                out = mixed.new_empty(len(hidden), mixed.shape[-1])
            out[call.rows] = mixed.flatten(0, 1)
            for key, state in of_sequences.items():
                if isinstance(call.slots, Tensor) and isinstance(state, Tensor):
                    states[key][call.slots] = state
                if call.kept_in is not None:
                    states[key][call.kept_in] = states[key][call.slots][0]
        assert out is not None
        return (out[None], *[None] * (len(result) - 1)) if isinstance(result, tuple) else out[None]

    def _of_sequences(self, key: StateKey, state: Tensor, call: Call) -> Tensor | InSlots:
        """Where a mixer finds the states: for a chunk a view, else all slots, or a copy for functions of torch."""
        if not call.is_single or key.kind not in self._kinds_in_slots:
            return state[call.slots]
        return InSlots(state, call.slots) if isinstance(call.slots, Tensor) else InSlots(state[call.slots], None)

    def _split(
        self, calls: list[Call], hidden: Tensor, states: dict[StateKey, Tensor], arguments: dict[str, Any]
    ) -> Iterator[Call]:
        """The calls; token by token where the mixer forgets the state before a chunk."""
        for call in calls:
            if not call.is_chunk or call.is_new:
                yield call
                continue
            if self.forgets is None:
                self.forgets = self._finds_no_state(call, hidden, states, arguments)
            if not self.forgets:
                yield call
                continue
            assert isinstance(call.rows, slice)
            for row in range(call.rows.start, call.rows.stop):
                yield call._replace(rows=slice(row, row + 1))  # if the state is kept, each keeps it, the last for good

    def _finds_no_state(
        self, call: Call, hidden: Tensor, states: dict[StateKey, Tensor], arguments: dict[str, Any]
    ) -> bool:
        """Whether the recurrent states before a chunk count for nothing: with NaN in their place, the results are none.
        That is so for the scan of Mamba 1 in torch, which begins with zeros."""
        if not any(key.kind == RECURRENT for key in states):
            return False
        copies: dict[StateKey, Any] = {}
        for key, state in states.items():
            copy = state[call.slots].clone()
            if key.kind == RECURRENT:
                copy.fill_(torch.nan)
            copies[key] = self._of_sequences(key, copy, call._replace(slots=slice(None)))
        cache = MixerCache(copies, is_new=False)
        result = self._on_ops(hidden[call.rows][None], **{**arguments, self._cache_argument: cache})
        mixed = result[0] if isinstance(result, tuple) else result
        return not bool(mixed.isnan().any())


def replace_mixers(model: nn.Module) -> None:
    """Give each mixer of the model a `MixerForward`."""
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        if hasattr(module, "layer_idx") and WRITES.intersection(forward.__code__.co_names):
            argument = cache_argument(forward)
            if argument is None:
                raise ValueError(f"{type(module).__name__} takes no cache as one of {', '.join(CACHE_ARGUMENTS)}")
            vars(module)["forward"] = MixerForward(module, argument)


def mixers(model: nn.Module) -> list[MixerForward]:
    """What replaces the forwards of the model's mixers."""
    return [module.forward for module in model.modules() if isinstance(module.forward, MixerForward)]


# ---- linear layers that do not come as the ops take them ------------------------------------------------------------


class WatchedWeight(Tensor):
    """The weight of a linear layer, given to another module during a trial."""

    layer: "WatchedLinear"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for weight in tree_leaves((args, kwargs)):
            if isinstance(weight, WatchedWeight):
                weight.layer.is_read |= func != Tensor.dtype.__get__  # type: ignore[attr-defined]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class WatchedLinear(nn.Linear):
    """A linear layer during a trial. is_read: whether its weight was read from outside; is_typed: whether it was asked
    for, if only for its dtype. is_scattered: whether the layer was given rows that are not contiguous."""

    is_read = False
    is_typed = False
    is_scattered = False
    _is_running = False

    def forward(self, hidden: Tensor) -> Tensor:
        self.is_scattered |= hidden.stride(-1) != 1
        self._is_running = True
        try:
            return super().forward(hidden)
        finally:
            self._is_running = False

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        if name != "weight" or self._is_running:
            return value
        self.is_typed = True
        weight = value.detach().as_subclass(WatchedWeight)
        weight.layer = self
        return weight


class OwnLinear(nn.Linear):
    """A linear layer that stays as it is, because another module reads its weight."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden)


def keep_linear_layers(model: nn.Module, names: list[str]) -> None:
    """Let the linear layers of these names stay as they are when the others are packed."""
    for name in names:
        model.get_submodule(name).__class__ = OwnLinear


class ContiguousRows(nn.Module):
    """A linear layer that is given rows which are not contiguous."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.linear(hidden.contiguous())
        return result


class WithDtype(nn.Module):
    """A linear layer whose weight is asked for its dtype alone."""

    def __init__(self, linear: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = linear
        self.weight = torch.empty(0, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.linear(hidden)
        return result


class LinearUse(NamedTuple):
    """What the modules of a model do with its linear layers, by name: read their weights; ask the weights for their
    dtype alone; give them scattered rows."""

    read: list[str]
    typed: list[str]
    scattered: list[str]


@contextmanager
def watch_linear_layers(model: nn.Module) -> Iterator[LinearUse]:
    """Say at the end how linear layers were used."""
    layers: dict[str, Any] = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
    for layer in layers.values():
        layer.__class__ = WatchedLinear
    use = LinearUse([], [], [])
    try:
        yield use
    finally:
        for name, layer in layers.items():
            if layer.is_read:
                use.read.append(name)
            else:
                use.typed.extend([name] * layer.is_typed)
                use.scattered.extend([name] * layer.is_scattered)
            for note in ("is_read", "is_typed", "is_scattered", "_is_running"):
                vars(layer).pop(note, None)
            layer.__class__ = nn.Linear

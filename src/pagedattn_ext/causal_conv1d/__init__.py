"""causal-conv1d's functions on the op `causal_conv1d`, on a CPU as on CUDA, without gradients.

    from pagedattn_ext.causal_conv1d import causal_conv1d_fn, causal_conv1d_update

Names, order, defaults and results are those of causal-conv1d 1.6. Weights of another dtype than x are converted to
fp32. `pagedattn_ext.ops.causal_conv1d` takes rows of sequences of any lengths, and states in slots.

The submodules import by absolute names, so that they load under the name `causal_conv1d` as well.
"""

from pagedattn_ext.causal_conv1d.causal_conv1d_interface import causal_conv1d_fn, causal_conv1d_update

__version__ = "1.6.2"  # of the causal-conv1d whose functions these are

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]

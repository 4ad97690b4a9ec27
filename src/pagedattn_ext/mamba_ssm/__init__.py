"""mamba-ssm's functions for inference on the op `selective_scan`, on a CPU as on CUDA, without gradients.

    from pagedattn_ext.mamba_ssm import mamba_chunk_scan_combined, selective_scan_fn, selective_state_update

Names, order, defaults and results are those of mamba-ssm 2.3. All compute token by token: `chunk_size` has no effect.
Tensors of several dtypes are computed with in fp32. `pagedattn_ext.ops.selective_scan` takes rows of sequences of any
lengths, and states in slots. `mamba_ssm.ops.triton.layernorm_gated` has norms with a gate, in plain torch.

The submodules import by absolute names, so that they load under the name `mamba_ssm` as well.
"""

from pagedattn_ext.mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from pagedattn_ext.mamba_ssm.ops.triton.selective_state_update import selective_state_update
from pagedattn_ext.mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

__version__ = "2.3.2"  # of the mamba-ssm whose functions these are

__all__ = ["mamba_chunk_scan_combined", "selective_scan_fn", "selective_state_update"]

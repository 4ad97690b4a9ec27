"""A sanitizer for paged caches: finds the first op that writes to another's block, or reads what nobody has written.

`CacheSanitizer` is told which caches there are and who owns each block, by calls where blocks are taken and given back
or by whole block tables. It watches the ops of this package, and checks what they read and write. A framework with
kernels of its own calls `writing` and `check_read` around them. Nothing of the package imports this module.
"""

from ._cache_error import CacheError as CacheError
from ._ops import unwatch as unwatch
from ._ops import watch as watch
from ._ops import watching as watching
from ._sanitizer import NO_BLOCK as NO_BLOCK
from ._sanitizer import CacheSanitizer as CacheSanitizer
from ._step import Row as Row

__all__ = ["NO_BLOCK", "CacheError", "CacheSanitizer", "Row", "unwatch", "watch", "watching"]

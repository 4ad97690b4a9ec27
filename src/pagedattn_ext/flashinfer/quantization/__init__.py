"""What FlashInfer has as quantization: masks in bits."""

from .packbits import packbits, segment_packbits

__all__ = ["packbits", "segment_packbits"]

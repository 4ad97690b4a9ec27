"""What mamba-ssm has as ops: `selective_scan_interface`, and `triton`."""

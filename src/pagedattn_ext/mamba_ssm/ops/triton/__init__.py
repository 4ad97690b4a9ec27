"""What mamba-ssm writes in Triton: `selective_state_update` and `ssd_combined`."""

"""What the fork has as layers: `rotary`."""

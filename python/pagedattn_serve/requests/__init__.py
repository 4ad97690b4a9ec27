"""A request from what a caller says to what it is told: checked, queued, its outputs as they come."""

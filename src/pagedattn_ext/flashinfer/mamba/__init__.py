"""Mamba's update of states."""

from .selective_state_update import selective_state_update

__all__ = ["selective_state_update"]

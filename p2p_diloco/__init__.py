"""Decentralised DiLoCo training: peers agree on ring epochs by themselves; nobody is in charge."""

__version__ = "0.1.0"

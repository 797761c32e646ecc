"""Train EAGLE-3 draft models for very large verifiers, and refuse wrong data on the way."""

__version__ = "0.1.0"

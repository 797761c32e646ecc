"""The stories: one module per stage, run as `python -m jobs.<stage> --config FILE`."""

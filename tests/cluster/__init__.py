"""A real Kubernetes cluster of two nodes on one machine, for the tests that need one.

`python -m tests.cluster up` starts it, `down` leaves the machine as it was found.
"""

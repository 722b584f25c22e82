"""Written by setup.py: what fog_pg._C was built for."""

TORCH_VERSION = "2.13.0+cpu"
NATIVE_MPI = False

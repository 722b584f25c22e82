TORCH_VERSIONS: tuple[str, ...]
VERSION: str
NATIVE_MPI: bool

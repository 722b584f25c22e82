"""What to write in place of public names that fogdist no longer has."""

from __future__ import annotations

_CODECS = "Int8 sends about as many bytes, and Int4, Sign and TopK send fewer"
_REPLICAS = "ChocoSGD takes the same codecs"
_DIFFERENT_DATA = "GradientTracking and ExactDiffusion are for data that differ between ranks"

# By module: the name, and what to use instead. docs/algorithms.md has the measurements.
REMOVED: dict[str, dict[str, str]] = {
    "fogdist.algorithms": {
        "BEER": f"{_REPLICAS}, GradientTracking has compression=Int8()",
        "DeepSqueeze": _REPLICAS,
        "GradientAllreduce": 'torch.nn.parallel.DistributedDataParallel averages gradients on the backend "fog"',
        "LEAD": f"{_REPLICAS}, ExactDiffusion has compression=Int8()",
        "MoniquaSGD": _REPLICAS,
        "PowerGossip": "ChocoSGD with TopK sends few bytes too",
        "QuasiGlobalMomentum": _DIFFERENT_DATA,
        "SlowMo": "DiLoCo makes local steps and an outer step with momentum",
        "WAGMA": "AsynchronousGossip and WinPut wait for no late rank",
    },
    "fogdist.compression": {"Float8": _CODECS, "Moniqua": _CODECS},
    "fogdist.topology": {
        "EquiStaticGraph": 'by_name("exp2", size) is a graph of few edges',
        "equi_dynamic": "base_graph(size) sends as little and reaches the exact average",
        "hyper_hypercube": "base_graph(size, degree) is the same where there is one",
        "simple_base_graph": "base_graph(size, degree) takes no more rounds",
    },
    "fogdist.training": {
        "CompressedAlgorithm": "ReplicaAlgorithm is the base of algorithms that need a codec"
    },
}


def missing(module: str, name: str) -> AttributeError:
    """Returns the error for a name that a module does not have; a module raises it from its ``__getattr__``."""
    instead = REMOVED.get(module, {}).get(name)
    text = f"module {module!r} has no attribute {name!r}"
    return AttributeError(text if instead is None else f"{text} any more: {instead}")

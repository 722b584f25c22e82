"""Programs that the commands start as separate processes; only these import torch."""

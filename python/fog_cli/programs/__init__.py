"""Programs that commands start as processes of their own; only these import torch."""

"""What a running job shows of itself: its timeline, its metrics, and the operations that its processes have in flight."""

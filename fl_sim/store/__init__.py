"""Storage on disk: files and their locks, tensors, run directories, checkpoints."""

"""What is kept on disk: tensors, run directories, checkpoints, locks."""

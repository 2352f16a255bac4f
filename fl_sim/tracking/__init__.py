"""Runs are shown by TensorBoard, MLflow, Weights & Biases and Trackio, one file each, as their own files tell them."""

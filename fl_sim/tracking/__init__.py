"""Runs are shown by TensorBoard, MLflow, Weights & Biases and Trackio, as their own files tell them."""

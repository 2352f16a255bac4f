"""Trackers: metrics of runs are sent to TensorBoard, MLflow, Weights & Biases and Trackio."""

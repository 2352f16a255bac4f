"""Trackers: send the metrics of runs to TensorBoard, MLflow, Weights & Biases or Trackio."""

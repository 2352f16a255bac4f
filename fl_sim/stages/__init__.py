"""What is done before the first round or after the last: one file or folder for each feature."""

"""Stages and procedures, one file or folder for each feature."""

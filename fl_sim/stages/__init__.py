"""Stages (code before the first or after the last round) and procedures that replace the rounds, one file each."""

"""The verbs of the command line: what can be typed stands in verbs, what it does in files of its own."""

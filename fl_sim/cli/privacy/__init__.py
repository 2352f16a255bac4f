"""``fl-sim privacy``: one file per verb."""

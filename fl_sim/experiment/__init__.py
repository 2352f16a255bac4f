"""An experiment: the value, the text it is read from, and what it means for the data at hand."""

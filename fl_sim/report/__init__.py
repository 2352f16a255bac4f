"""Reports on experiments: progress display, figures, tables, and the reader of run directories."""

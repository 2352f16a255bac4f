"""Reports on runs: progress display, tables, figures, the report page, and the code that reads run directories."""

"""What people see of an experiment: progress, figures, tables, run directories."""

"""What the script does: values of its lines, steps, numbers."""

"""What is its user's, and stays as it is: files."""

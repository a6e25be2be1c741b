"""What the script gets: random numbers, samples, batch norm, as one process has them."""

"""The experiments of the paper: its networks, its tables, and the numbers that came out."""

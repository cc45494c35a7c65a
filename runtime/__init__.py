"""What runs on every rank; needs torch alone."""

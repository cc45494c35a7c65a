"""autopart: from an unmodified PyTorch model to the distributed program that trains it."""

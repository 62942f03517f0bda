"""How fast a tower runs here, beside the rate at which this machine multiplies matrices."""

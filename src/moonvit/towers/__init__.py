"""One file a family: plain modules whose parameter names are the checkpoint's."""

"""Pictures into patches: reading, planning sizes, and one processor a family."""

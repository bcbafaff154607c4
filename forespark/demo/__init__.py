"""`forespark demo`: one chat answer with ForeSpark and one without, on any CPU."""

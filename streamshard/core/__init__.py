"""When each transfer happens: forwards, backwards, reductions, and the hooks by which torch reports."""

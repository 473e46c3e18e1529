"""StreamShard inside other libraries, none of which is imported before its module here is."""

"""StreamShard inside other libraries. Each library is imported only with its module here."""

"""Order the first results of a search, or a list of texts, again: by their token vectors."""

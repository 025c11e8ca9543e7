"""From files of rows to batches of tokens: reading, formats, chat templates, packing, and what is wrong with rows."""

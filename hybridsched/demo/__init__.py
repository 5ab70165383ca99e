"""The demo's task: its data set, tokenizer and starting model, all made on the spot and equal for equal seeds."""
